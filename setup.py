"""What pyproject.toml cannot say: a wheel also holds the folder `configs`, which `kvcached init` reads."""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithConfigs(build_py):
    """Copy the examples and the systemd unit into the package, unless the install is an editable one."""

    def run(self) -> None:
        """Build as usual, then copy."""
        super().run()
        if self.editable_mode:
            return
        target = Path(self.build_lib, "kvcached", "configs")
        target.mkdir(parents=True, exist_ok=True)
        for source in sorted(Path("configs").iterdir()):
            self.copy_file(str(source), str(target / source.name))


setup(cmdclass={"build_py": BuildWithConfigs})
