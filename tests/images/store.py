"""Builds images with buildah, which needs neither a daemon nor a registry, and measures what fills them.

Everything lies in one folder, which `Store.close` removes.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from deploy.generate import HERE
from tests.images.machine import apt_mirror, pip_places, pip_settings

# The packages of the stand-in for the base images, which have Python, pip and certificates of authorities.
PACKAGES = "python3,python3-pip,python3-venv,ca-certificates"


class Store:
    """A storage of images in `folder`, which is the store's own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True)
        settings = pip_settings()
        (folder / "pip.conf").write_text(settings)
        # A build sees this machine's settings of pip and apt, and the image does not keep them.
        self._shown = {folder / "pip.conf": "/etc/pip.conf", Path("/etc/apt"): "/etc/apt"}
        self._shown |= {place: str(place) for place in pip_places(settings)}

    def buildah(self, *arguments: str) -> str:
        """Run buildah and return what it prints. Raises RuntimeError with the end of its errors."""
        where = ["--root", str(self.folder / "storage"), "--runroot", str(self.folder / "run")]
        command = ["buildah", *where, "--storage-driver", "vfs", *arguments]
        env = {**os.environ, "TMPDIR": str(self.folder), "BUILDAH_ISOLATION": "chroot"}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
        if done.returncode:
            raise RuntimeError(f"buildah {arguments[0]}: {done.stdout[-1500:]}\n{done.stderr[-3000:]}")
        return done.stdout.strip()

    def make_base(self, name: str) -> None:
        """Make a base image of this machine's release with Python, as a stand-in for images of a registry."""
        codename, mirror = apt_mirror()
        with self.container("scratch") as (container, root):
            command = ["debootstrap", "--variant=minbase", f"--include={PACKAGES}", codename, str(root), mirror]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise RuntimeError(f"debootstrap: {done.stdout[-3000:]}{done.stderr[-1000:]}")
            (root / "usr/bin/python").symlink_to("python3")
            shutil.rmtree(root / "var/cache/apt/archives")
            shutil.rmtree(root / "var/lib/apt/lists")
            # The sources name this machine's mirror.
            (root / "etc/apt/sources.list").unlink()
            self.buildah("commit", container, name)

    def build(self, dockerfile: Path, context: Path, name: str, arguments: Mapping[str, str]) -> None:
        """Build a Dockerfile from the files in `context`."""
        given = [f"--build-arg={key}={value}" for key, value in arguments.items()]
        self.buildah(
            "build",
            *given,
            *(f"--volume={place}:{there}:ro" for place, there in self._shown.items()),
            f"--file={dockerfile}",
            f"--ignorefile={HERE.parent / '.dockerignore'}",
            f"--tag={name}",
            str(context),
        )

    @contextlib.contextmanager
    def container(self, image: str) -> Iterator[tuple[str, Path]]:
        """Yield the name and the root folder of a container made from an image."""
        container = self.buildah("from", "--pull-never", image)
        try:
            yield container, Path(self.buildah("mount", container))
        finally:
            self.buildah("rm", container)

    def config(self, image: str) -> dict[str, Any]:
        """Return the image's configuration, as the OCI image specification defines it."""
        config: dict[str, Any] = self._image(image)["config"]
        return config

    def layers(self, image: str) -> list[str]:
        """Return the digests of the image's layers, uncompressed, the base image's first: the image's DiffIDs in the
        OCI image specification."""
        layers: list[str] = self._image(image)["rootfs"]["diff_ids"]
        return layers

    def _image(self, image: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.buildah("inspect", "--type", "image", image))["OCIv1"]
        return found

    def close(self) -> None:
        """Remove all images and files."""
        shutil.rmtree(self.folder)
