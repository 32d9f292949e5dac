"""Run `make images`: build the images, run them, and print what fills them and what was checked.

The stand-ins for the base images are made from this machine's packages, since Docker's registry may be out of reach.
The last line is JSON: for each image its size above its base in MB, the digests of its layers, and the checks that have
passed.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterator

from deploy.generate import HERE
from tests.images import checks
from tests.images.builds import CONTROL, INIT, VLLM, VLLM_BASE, Images
from tests.images.site import Site
from tests.images.sizes import table
from tests.needed import IMAGES
from tests.processes import ROOT

PAGE = HERE / "images" / "README.md"
BEGIN, END = "<!-- sizes: begin -->\n", "<!-- sizes: end -->\n"
FOLDER = ROOT / "build" / "images"


def passed(image: str, found: Iterator[str]) -> list[str]:
    """Run checks and print each that passes."""
    names = []
    for name in found:
        print(f"{image.partition('/')[2]}: {name}", flush=True)
        names.append(name)
    return names


def run(engines: bool, cupy: bool) -> tuple[dict[str, dict[str, object]], str]:
    """Build and check the images; return the size, layers and checks of each, and the tables of sizes as Markdown."""
    images = Images(FOLDER)
    try:
        images.control()
        images.init(cupy)
        if engines:
            images.vllm(cupy)
        site = Site(images.store, FOLDER / "site", CONTROL)
        try:
            pod = checks.engine_pod(site, with_init=True)
            found = {CONTROL: passed(CONTROL, checks.control(site)), INIT: passed(INIT, checks.init(site, INIT, pod))}
            if engines:
                found[INIT] += passed(INIT, checks.engine(site, VLLM_BASE, pod))
                found[VLLM] = passed(VLLM, checks.engine(site, VLLM, checks.engine_pod(site, with_init=False)))
        finally:
            site.close()
        added = {name: images.added(name) for name in found}
        report: dict[str, dict[str, object]] = {
            name.partition("/")[2]: {
                "mb_above_base": round(sum(added[name].values()) / 1e6, 1),
                "layers": images.store.layers(name),
                "checked": checked,
            }
            for name, checked in found.items()
        }
    finally:
        images.close()
    tables = [f"**{name.partition('/')[2]}**\n\n" + "\n".join(table(files)) for name, files in added.items()]
    return report, "\n\n".join(tables) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.images", description=__doc__)
    parser.add_argument("--without-engines", action="store_true", help="leave out the images with vLLM, 3 GB each")
    parser.add_argument("--without-cupy", action="store_true", help="leave CuPy out of the images with the agent")
    parser.add_argument("--save", action="store_true", help=f"write the sizes to {PAGE.relative_to(ROOT)}")
    args = parser.parse_args()
    if not IMAGES.found():
        raise SystemExit(IMAGES.reason)
    shutil.rmtree(FOLDER, ignore_errors=True)
    report, tables = run(not args.without_engines, not args.without_cupy)
    print(tables)
    if args.save:
        text = PAGE.read_text(encoding="utf-8")
        PAGE.write_text(f"{text.split(BEGIN)[0]}{BEGIN}{tables}{END}{text.split(END)[1]}", encoding="utf-8")
    print(json.dumps({"images": report}))


if __name__ == "__main__":
    main()
