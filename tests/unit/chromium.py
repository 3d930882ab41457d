"""A page run by Chromium, where there is one: a script is added to a copy of it and says what it found."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from contextlib import suppress
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
OPTIONS = "--headless --no-sandbox --disable-gpu --window-size=1000,700 --virtual-time-budget=4000 --dump-dom"

# A page of which only the document is asked is hardly ever painted, so frames come by the clock.
WATCH = """<body><script>
const faults = [];
window.requestAnimationFrame = (draw) => setTimeout(draw, 16);
addEventListener('error', (event) => faults.push(event.message));
</script>"""

DRIVE = """<script>
const pause = (time) => new Promise((done) => setTimeout(done, time));
const {chart, base, glass, blend, hint, timeline, view, layout, xOf, rowTop, stripTop} = /*DRAWN*/;
async function send(event) {
  chart.dispatchEvent(event);
  await pause(40);
}
function mouse(x, y) {
  const box = chart.getBoundingClientRect();
  return {clientX: box.left + x, clientY: box.top + y, pointerId: 1, pointerType: 'mouse',
          bubbles: true, cancelable: true};
}
const pointAt = (x, y) => send(new PointerEvent('pointermove', mouse(x, y)));
const turn = (x, y, deltaY) => send(new WheelEvent('wheel', {...mouse(x, y), deltaY}));
const press = (key) => send(new KeyboardEvent('keydown', {key, bubbles: true}));
const shown = () => chart.parentElement.querySelector('.shown').textContent;
function card() {
  if (hint.hidden) return '';
  const told = ({tagName, textContent}) => (tagName === 'DT' ? '; ' : ' ') + textContent;
  return hint.firstChild.textContent + [...hint.querySelectorAll('dt, dd')].map(told).join('');
}
function pixel(context, x, y) {
  const {data} = context.getImageData(x * devicePixelRatio, y * devicePixelRatio, 1, 1);
  const digits = [...data].slice(0, 3).map((part) => part.toString(16).padStart(2, '0'));
  return data[3] ? `#${digits.join('')}` : '';
}
(async () => {
  let told = {};
  try {
    await pause(40);
    told = await (async () => { /*SCRIPT*/ })();
  } catch (error) {
    faults.push(String(error));
  }
  document.body.dataset.told = JSON.stringify({...told, faults});
})();
</script></body>"""


def run_page(page: str, script: str, folder: Path, address: str = "", drawn: str = "drawn") -> dict[str, Any]:
    """What the body `script` of an async function returns at the end of `page`, and `faults`, all errors.

    `drawn`: the page's expression for what `drawTimeline` has returned.
    """
    assert CHROMIUM is not None
    file = folder / "page.html"
    copy = page.replace("<body>", WATCH).replace(
        "</body>", DRIVE.replace("/*SCRIPT*/", script).replace("/*DRAWN*/", drawn)
    )
    file.write_text(copy, encoding="utf-8")
    browser = subprocess.Popen(
        [CHROMIUM, *OPTIONS.split(), f"--user-data-dir={folder / 'profile'}", file.as_uri() + address],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        document = browser.communicate(timeout=60)[0].decode()
    finally:
        with suppress(ProcessLookupError):
            os.killpg(browser.pid, signal.SIGKILL)
        browser.wait()
    reader = _Told()
    reader.feed(document)
    assert reader.told is not None, f"the script never ended: {document[-2000:]}"
    return dict(json.loads(reader.told))


class _Told(HTMLParser):
    told: str | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "body":
            self.told = dict(attrs).get("data-told")
