"""The images of the control plane and of the init container are built and run, as `make images` does it.

`make images` also builds and runs images with vLLM, which take 3 GB each and several minutes.
"""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.images import checks
from tests.images.builds import CONTROL, INIT, Images
from tests.images.site import Site
from tests.images.store import Store
from tests.needed import IMAGES

# Largest size of the control plane's image above its base, in MB: about half of what pip installs.
CONTROL_MB = 110


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Images]:
    """Build both images; nothing is left of them after the tests."""
    IMAGES.require()
    folder = tmp_path_factory.mktemp("images") / "store"
    images = Images(folder)
    try:
        images.control()
        images.init(cupy=False)
        yield images
    finally:
        images.close()
        assert not folder.exists()
        assert str(folder) not in Path("/proc/mounts").read_text()


@pytest.mark.timeout(2400)
def test_an_image_holds_what_its_dockerfile_adds(images: Images) -> None:
    control, init = images.added(CONTROL), images.added(INIT)
    assert sum(control.values()) < CONTROL_MB * 1e6
    # The machine's settings of pip and apt, which the build has used, are not in the image; buildah leaves empty files
    # in their places.
    assert {path.split("/")[1] for path, size in control.items() if size} == {"opt"}
    assert {path.split("/")[1] for path, size in init.items() if size} == {"agent"}
    left_out = ("/pip/", "__pycache__", "/tests/")
    assert [path for path in control if path.startswith("/opt/") and any(name in path for name in left_out)] == []
    assert "/agent/meridian_agent/plugin.py" in init


def test_the_listed_layers_are_those_of_the_image(tmp_path: Path) -> None:
    """The digests of a small image are compared with those of the files that buildah would push to a registry."""
    IMAGES.require()
    store, layout = Store(tmp_path / "store"), tmp_path / "layout"

    def blob(digest: str) -> Path:
        return layout / "blobs" / digest.replace(":", "/")

    try:
        for base, name in (("scratch", "localhost/first"), ("localhost/first", "localhost/second")):
            with store.container(base) as (container, root):
                (root / name.rpartition("/")[2]).write_text(name)
                store.buildah("commit", container, name)
        store.buildah("push", "localhost/second", f"oci:{layout}")
        (pushed,) = json.loads((layout / "index.json").read_text())["manifests"]
        found = []
        for layer in json.loads(blob(pushed["digest"]).read_text())["layers"]:
            with gzip.open(blob(layer["digest"])) as content:
                found.append("sha256:" + hashlib.sha256(content.read()).hexdigest())
        assert store.layers("localhost/second") == found
        assert store.layers("localhost/first") == found[:1] != found
    finally:
        store.close()


def test_the_containers_run_as_the_manifests_say(images: Images, tmp_path: Path) -> None:
    site = Site(images.store, tmp_path / "site", CONTROL)
    try:
        assert len(list(checks.control(site))) == 8
        assert len(list(checks.init(site, INIT, checks.engine_pod(site, with_init=True)))) == 1
    finally:
        site.close()
