// The visible part of the timeline, and the layout of the canvas.

const chart = root.querySelector('.plot');
const full = {from: 0, to: timeline.length || 1};
const view = {...full};  // in ticks
const layout = measure();
let writing = 0;

// All lengths in CSS pixels: a row for each rank, with a lane for each of its stages, and one for its waits below
// its cells; the time axis; a strip of memory for each rank.
function measure() {
  const width = Math.max(chart.clientWidth, 240), ranks = timeline.ranks;
  const fit = (share, least, most) =>
    Math.min(most, Math.max(least, Math.floor(share * window.innerHeight / ranks)));
  const lane = timeline.blocked ? 7 : 0, row = fit(0.45, 15, Math.max(38, 5 + 17 * timeline.lanes)) + lane;
  const strip = timeline.memory ? fit(0.3, 15, 46) : 0;
  const rowGap = row > 24 ? 5 : 2, stripGap = 3;
  const left = width > 500 ? 58 : 24, right = width - (strip ? 46 : 12);
  const top = 4, bottom = top + ranks * row, memory = bottom + (strip ? 52 : 24), end = memory + ranks * strip;
  return {
    width, height: end + 8, left, right, top, bottom, memory, end, lane,
    row, strip, rowHeight: row - rowGap - lane, stripHeight: strip - stripGap,
    cellHeight: (row - rowGap - lane) / timeline.lanes,
  };
}

function pixelsPerTick() {
  return (layout.right - layout.left) / (view.to - view.from);
}

function xOf(tick) {
  return layout.left + (tick - view.from) * pixelsPerTick();
}

function tickAt(x) {
  return view.from + (x - layout.left) / pixelsPerTick();
}

function rowTop(rank) {
  return layout.top + rank * layout.row;
}

function cellTop(cell) {
  const {rank, stage} = timeline.cells;
  return rowTop(rank[cell]) + timeline.laneOf[stage[cell]] * layout.cellHeight;
}

function stripTop(rank) {
  return layout.memory + rank * layout.strip;
}

// The rank whose row is at a height, and whether it is its cells, its waits or its memory; null between rows.
function rowAt(y) {
  const {top, bottom, memory, end, row, strip, rowHeight, lane} = layout;
  if (y >= top && y < bottom) {
    const rank = Math.floor((y - top) / row);
    return {rank, of: lane && y - rowTop(rank) >= rowHeight ? 'waits' : 'cells'};
  }
  if (y >= memory && y < end) return {rank: Math.floor((y - memory) / strip), of: 'memory'};
  return null;
}

// Shows `from` to `to`, clipped to the timeline. Returns whether the view changed.
function show(from, to) {
  const least = Math.min(timeline.shortest / 2, full.to);
  const length = Math.min(Math.max(to - from, least), full.to);
  const start = Math.min(Math.max((from + to - length) / 2, 0), full.to - length);
  const changed = start !== view.from || start + length !== view.to;
  view.from = start;
  view.to = start + length;
  if (changed) {
    redraw();
    clearTimeout(writing);  // browsers limit how often the address may change
    if (keepsAddress) writing = setTimeout(writeAddress, 300);
  }
  return changed;
}

// Zooms by a factor around x.
function zoom(factor, x = (layout.left + layout.right) / 2) {
  const still = tickAt(x);
  const length = Math.min((view.to - view.from) * factor, full.to);
  const from = still - (still - view.from) * length / (view.to - view.from);
  return show(from, from + length);
}

function pan(pixels) {
  const ticks = pixels / pixelsPerTick();
  return show(view.from + ticks, view.to + ticks);
}

function showAll() {
  return show(full.from, full.to);
}

function isShown(cell) {
  const start = timeline.cells.start[cell], end = timeline.cells.end[cell];
  return start < end ? end > view.from && start < view.to : start >= view.from && start <= view.to;
}

// Moves the view so that it contains a cell.
function reveal(cell) {
  const length = view.to - view.from;
  if (timeline.cells.start[cell] < view.from || timeline.cells.end[cell] > view.to) {
    const from = middleOf(cell) - length / 2;
    show(from, from + length);
  }
}

// A time with the precision of one pixel.
function nearText(tick) {
  return timeText(tick, 0.5 / pixelsPerTick());
}

// The visible range in the address, in the unit of the costs: #from=10&to=20.

function showAddress() {
  const words = new URLSearchParams(location.hash.slice(1));
  const [from, to] = ['from', 'to'].map((word) => Number(words.get(word) ?? NaN) / timeline.tick);
  if (from < to) show(from, to);
  else showAll();
}

function writeAddress() {
  const whole = view.from === full.from && view.to === full.to;
  const address = whole ? '' : `#from=${nearText(view.from)}&to=${nearText(view.to)}`;
  if (address === location.hash) return;
  try {
    history.replaceState(null, '', location.href.split('#')[0] + address);
  } catch {
    // A page embedded in another may have no address of its own.
  }
}
