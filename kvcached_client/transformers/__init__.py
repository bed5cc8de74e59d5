"""Models of Hugging Face transformers whose prompts' KV the daemon keeps."""

from kvcached_client.transformers.prompt_cache import PromptCache

__all__ = ["PromptCache"]
