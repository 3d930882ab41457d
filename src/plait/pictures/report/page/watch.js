'use strict';

// Loads the page again when the files of its runs have changed; what was zoomed stays zoomed.

const every = 2000;  // milliseconds
let version = null;
const zoomed = JSON.parse(sessionStorage.getItem('zoomed') ?? 'null');
if (zoomed && typeof plots !== 'undefined' && plots.length) plots[0].setScale('x', zoomed);

function remember() {
  sessionStorage.removeItem('zoomed');
  if (typeof plots === 'undefined' || !plots.length) return;
  const {min, max} = plots[0].scales.x, steps = plots[0].data[0];
  if (min > steps[0] || max < steps.at(-1)) sessionStorage.setItem('zoomed', JSON.stringify({min, max}));
}

setInterval(async () => {
  const answer = await fetch('/version').catch(() => null);
  if (!answer?.ok) return;
  const now = await answer.text();
  if (version !== null && now !== version) {
    remember();
    location.reload();
  }
  version = now;
}, every);
