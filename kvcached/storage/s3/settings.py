"""The settings of the backend `s3`."""

from __future__ import annotations

import ipaddress
import re
from typing import Annotated, Final
from urllib.parse import SplitResult, urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo

from kvcached.config.problems import mistake
from kvcached.storage.settings import AbsolutePath

_BUCKET: Final = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
#: What no service and no library writes in another way; a part of two dots would lead out of the prefix.
_PREFIX: Final = re.compile(r"(?:[A-Za-z0-9_=-][A-Za-z0-9_.=-]*/)+")
_PREFIX_CHARS_MAX: Final = 512


def _bucket(name: str) -> str:
    if not _BUCKET.fullmatch(name):
        raise mistake("is no name of a bucket", "give 3 to 63 of a-z, 0-9, - and .")
    return name


def _prefix(prefix: str) -> str:
    if not _PREFIX.fullmatch(prefix) or len(prefix) > _PREFIX_CHARS_MAX:
        raise mistake("is no prefix", 'give one that ends with /, as "kvcached/", of letters, digits and _ . = -')
    return prefix


def _endpoint(endpoint: str, info: ValidationInfo) -> str:
    parts = _split(endpoint)
    if parts is None:
        fix = 'give "https://HOST" or "https://HOST:PORT", without a path'
        raise mistake("is no endpoint", fix, is_secret=True)  # it may hold a password
    if parts.scheme == "http" and not info.data.get("allow_http") and not _is_loopback(parts.hostname or ""):
        fix = "give https://, or set allow_http = true where nobody else uses the network"
        raise mistake("is not encrypted", fix)
    return endpoint.rstrip("/")


def _needed_endpoint(endpoint: str | None, info: ValidationInfo) -> str | None:
    if endpoint is None and info.data.get("allow_http"):
        raise mistake("is missing, and allow_http is of an endpoint alone", "add it, or leave out allow_http")
    return endpoint


def _profile(profile: str, info: ValidationInfo) -> str:
    if info.data.get("credentials_file", profile) is None:
        raise mistake("is a section of no file", "name a credentials_file, or leave it out")
    return profile


def _split(endpoint: str) -> SplitResult | None:
    """The parts of an endpoint; None if it has others than scheme, host and port."""
    try:
        parts = urlsplit(endpoint)
        is_right = parts.port != 0 and endpoint.isascii() and not re.search(r"\s", endpoint)
    except ValueError:  # of a port, or of an address in brackets
        return None
    others = parts.path.strip("/") or parts.query or parts.fragment or "@" in parts.netloc
    return parts if is_right and parts.scheme in {"http", "https"} and parts.hostname and not others else None


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class S3Settings(BaseModel):
    """Settings of one bucket, which any number of daemons use."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    bucket: Annotated[str, AfterValidator(_bucket)] = Field(description="The bucket. It must exist.")
    prefix: Annotated[str, AfterValidator(_prefix)] = Field(
        default="kvcached/", description="What the names of all objects begin with. Daemons that share blocks have one."
    )
    region: str = Field(default="us-east-1", pattern=r"^[A-Za-z0-9-]{1,64}$", description="The bucket's region.")
    allow_http: bool = Field(
        default=False, description="Whether an endpoint on another machine may be http://, which is not encrypted."
    )
    endpoint: Annotated[Annotated[str, AfterValidator(_endpoint)] | None, AfterValidator(_needed_endpoint)] = Field(
        default=None,
        validate_default=True,
        description="The service, as https://HOST:PORT. Default: AWS in the region.",
    )
    path_style: bool | None = Field(
        default=None,
        description="Whether the bucket stands in the path of a request, not in its host. Default: if there is an"
        " endpoint, or the name of the bucket has dots.",
    )
    credentials_file: AbsolutePath | None = Field(
        default=None,
        description="Keys, as in the shared credentials file of AWS. Default: the role of the machine or Pod.",
    )
    profile: Annotated[str, AfterValidator(_profile)] = Field(
        default="default", min_length=1, max_length=128, description="The section of the credentials file."
    )
    ca_file: AbsolutePath | None = Field(
        default=None, description="Further certificate authorities that the endpoint's certificate may be of, as PEM."
    )
    threads: int = Field(
        default=8, ge=1, le=16, description="Concurrent calls, each of up to 32 requests at the same time."
    )

    @property
    def has_bucket_in_path(self) -> bool:
        """Whether requests are path-style. No certificate of AWS is for a host with a bucket whose name has dots."""
        return self.endpoint is not None or "." in self.bucket if self.path_style is None else self.path_style

    @property
    def service(self) -> str:
        """The service as a URL."""
        return self.endpoint or f"https://s3.{self.region}.amazonaws.com"

    @property
    def is_on_this_machine(self) -> bool:
        """Whether the service has an address of this machine alone."""
        return _is_loopback(urlsplit(self.service).hostname or "")

    @property
    def bucket_endpoint(self) -> str:
        """The URL as the library wants it: with the bucket, where that stands in the host."""
        scheme, _, host = self.service.partition("://")
        return self.service if self.has_bucket_in_path else f"{scheme}://{self.bucket}.{host}"
