"""Take pictures of the status page of a live fleet: `python -m tests.pictures` (about five minutes), which is `make
pictures`. It needs Debian's `chromium`.

Each picture has one view of the page at 1280 and at 390 pixels beside each other, light or dark, and is written to
deploy/pictures as a PNG with a palette. The exit status is 1 if a picture is too large or the page complains.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from PIL import Image
from playwright.async_api import async_playwright

from tests.needed import CHROMIUM
from tests.pictures.fleet import Fleet

if TYPE_CHECKING:
    from playwright.async_api import Browser, Page

PICTURES = Path(__file__).resolve().parents[2] / "deploy" / "pictures"
VIEWS = ("overview", "engines", "requests", "policy", "budgets")
SCHEMES: tuple[Literal["light", "dark"], ...] = ("light", "dark")
WIDTHS = (1280, 390)
# Largest height of a picture in pixels, colours of its palette, and its largest size in bytes.
MAX_HEIGHT, COLOURS, MAX_BYTES = 1500, 64, 120_000
GAP = 40


async def shot(page: Page, width: int, scheme: Literal["light", "dark"]) -> Image.Image:
    await page.emulate_media(color_scheme=scheme)
    await page.set_viewport_size({"width": width, "height": 900})
    await page.mouse.move(0, 0)
    return Image.open(io.BytesIO(await page.screenshot(full_page=True))).convert("RGB")


def beside(images: list[Image.Image]) -> Image.Image:
    """Return the images beside each other, cut to MAX_HEIGHT, on the colour of their corner."""
    height = min(MAX_HEIGHT, max(image.height for image in images))
    width = sum(image.width for image in images) + GAP * (len(images) - 1)
    joined = Image.new("RGB", (width, height), images[0].getpixel((0, 0)))
    x = 0
    for image in images:
        joined.paste(image, (x, 0))
        x += image.width + GAP
    return joined


def save(image: Image.Image, path: Path) -> int:
    """Write a picture with a palette, and return its size in bytes."""
    image.quantize(COLOURS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(path, optimize=True)
    return path.stat().st_size


async def open_view(page: Page, address: str, view: str) -> None:
    """Open a view and wait until it is filled; the requests' view shows the life of the newest request that a
    rule or cap ended."""
    await page.goto(f"{address}/#{view}")
    await page.locator(f"#{view}:not(.stale)").wait_for()
    # The footer names the host.
    await page.evaluate("document.querySelector('footer').hidden = true")
    if view == "overview":
        await page.locator("#history svg").first.wait_for()
    if view == "requests":
        await page.locator("#ends-table tr", has=page.get_by_text("applied", exact=True)).locator("a").first.click()
        await page.locator("#life h4").wait_for()
        await page.evaluate("document.activeElement.blur()")


async def take(browser: Browser, address: str, folder: Path) -> int:
    """Take all pictures; return the number of complaints."""
    page, complaints = await browser.new_page(), list[str]()
    page.on("console", lambda m: complaints.append(m.text) if m.type in ("error", "warning") else None)
    page.on("pageerror", lambda e: complaints.append(str(e)))
    for view in VIEWS:
        await open_view(page, address, view)
        for scheme in SCHEMES:
            path = folder / f"{view}-{scheme}.png"
            size = save(beside([await shot(page, width, scheme) for width in WIDTHS]), path)
            print(f"{path.name:24} {size:7,} bytes")
            if size > MAX_BYTES:
                complaints.append(f"{path.name} has {size:,} bytes, more than {MAX_BYTES:,}")
    await page.close()
    for complaint in complaints:
        print(complaint, file=sys.stderr)
    return len(complaints)


async def run(folder: Path, stretch_s: float) -> int:
    with tempfile.TemporaryDirectory(prefix="meridian-pictures-") as kept:
        fleet = Fleet(Path(kept))
        try:
            await fleet.started()
            await fleet.live(stretch_s)
            async with async_playwright() as playwright:
                program = CHROMIUM.found() or None
                browser = await playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
                return 1 if await take(browser, f"http://{fleet.page}", folder) else 0
        finally:
            await fleet.end()


def main() -> int:
    p = argparse.ArgumentParser(prog="python -m tests.pictures", description=__doc__)
    p.add_argument("--stretch", type=float, default=45.0, help="seconds between two events")
    p.add_argument("--output", type=Path, default=PICTURES, help="folder of the pictures")
    args = p.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    return asyncio.run(run(args.output, args.stretch))


if __name__ == "__main__":
    sys.exit(main())
