// Events of mouse, touch and keyboard.

const down = new Map();  // the pressed pointers, and their positions
let travelled = 0;  // pixels since the first pointer was pressed

function placeOfEvent(event) {
  const box = chart.getBoundingClientRect();
  return {x: event.clientX - box.left, y: event.clientY - box.top};
}

chart.addEventListener('pointerdown', (event) => {
  if (event.button !== 0) return;
  chart.setPointerCapture(event.pointerId);
  if (!down.size) travelled = 0;
  down.set(event.pointerId, placeOfEvent(event));
});

chart.addEventListener('pointermove', (event) => {
  const now = placeOfEvent(event), before = down.get(event.pointerId);
  if (!before) {
    lookAt(now.x, now.y);
    return;
  }
  travelled += Math.abs(now.x - before.x);
  if (down.size === 1) {
    if (travelled < 4) return;  // still a click; `before` is not updated, so no movement is lost
    pan(before.x - now.x);
  } else {
    const [other] = [...down].filter(([id]) => id !== event.pointerId).map(([, place]) => place);
    const apart = (place) => Math.max(Math.abs(place.x - other.x), 10);
    zoom(apart(before) / apart(now), other.x);
  }
  pointer = null;
  chart.classList.add('moving');
  dismiss();
  down.set(event.pointerId, now);
});

for (const ending of ['pointerup', 'pointercancel']) {
  chart.addEventListener(ending, (event) => {
    const {x, y} = placeOfEvent(event);
    if (down.delete(event.pointerId) && ending === 'pointerup' && travelled < 4) lookAt(x, y);
    if (!down.size) chart.classList.remove('moving');
  });
}

chart.addEventListener('pointerleave', (event) => {
  if (event.pointerType === 'touch') return;  // when a finger is lifted, the tooltip stays
  pointer = null;
  dismiss();
});

chart.addEventListener('wheel', (event) => {
  const {x, y} = placeOfEvent(event), line = [1, 20, 400][event.deltaMode];
  const aside = event.shiftKey ? event.deltaX || event.deltaY : event.deltaX;
  const sideways = event.shiftKey || Math.abs(aside) > Math.abs(event.deltaY);
  const speed = event.ctrlKey ? 0.01 : 0.002;  // with Ctrl: a pinch on a trackpad
  const changed = sideways ? pan(aside * line) : zoom(Math.exp(event.deltaY * line * speed), x);
  // Zooming out further when all is shown scrolls the page.
  if (changed || event.ctrlKey || (!sideways && event.deltaY < 0)) event.preventDefault();
}, {passive: false});

chart.addEventListener('dblclick', showAll);

chart.addEventListener('blur', () => {
  if (!pointer) dismiss();
});

chart.addEventListener('keydown', (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const middle = chosen < 0 ? undefined : xOf(middleOf(chosen));
  const tenth = (layout.right - layout.left) / 10, shift = event.shiftKey;
  const deed = {
    '+': () => zoom(1 / 1.5, middle),
    '=': () => zoom(1 / 1.5, middle),
    '-': () => zoom(1.5, middle),
    '0': showAll,
    Home: showAll,
    Escape: dismiss,
    ArrowLeft: () => (shift ? pan(-tenth) : step(-1, 0)),
    ArrowRight: () => (shift ? pan(tenth) : step(1, 0)),
    ArrowUp: () => step(0, -1),
    ArrowDown: () => step(0, 1),
  }[event.key];
  if (!deed) return;
  event.preventDefault();
  deed();
});

// Chooses the previous or next action, or the action of a neighbour rank at the same time.
function step(along, across) {
  const {first, cells} = timeline;
  const rank = chosen < 0 ? 0 : cells.rank[chosen] + across;
  if (rank < 0 || rank >= timeline.ranks) return;
  const when = chosen < 0 ? view.from : middleOf(chosen);
  const then = across || chosen < 0 ? cellAfter(rank, when) : chosen + along;
  choose(Math.max(first[rank], Math.min(then, first[rank + 1] - 1)));
}

root.querySelector('.closer').addEventListener('click', () => zoom(1 / 1.5));
root.querySelector('.wider').addEventListener('click', () => zoom(1.5));
root.querySelector('.whole').addEventListener('click', showAll);

function fit() {
  const now = measure();
  if (Object.keys(now).every((length) => now[length] === layout[length])) return;
  Object.assign(layout, now);
  redraw();  // which also moves the tooltip
}

new ResizeObserver(fit).observe(chart);
window.addEventListener('resize', () => {
  fit();
  redraw();  // another screen may have another resolution
});
if (keepsAddress) window.addEventListener('hashchange', showAddress);
window.matchMedia('(prefers-color-scheme: dark)').addEventListener('change', redraw);
if (keepsAddress) showAddress();
redraw();
