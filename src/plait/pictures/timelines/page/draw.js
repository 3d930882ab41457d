// The base picture on one canvas: rows of cells, the time axis, and the strips of memory.

const SANS = 'system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif';
const BOLD = `600 11px ${SANS}`;
const NARROW = 2;  // cells with fewer pixels are blended with their neighbours
const base = root.querySelector('.base').getContext('2d');
const blend = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
const ON_CELL = colour('on-cell');
const labels = new Map();  // width of the longest label, with and without its stage
let waiting = false;

// Draws once before the next frame, however often it is called.
function redraw() {
  if (!waiting) requestAnimationFrame(draw);
  waiting = true;
}

function draw() {
  waiting = false;
  fitCanvas(base);
  drawAxis();
  drawRows();
  for (let rank = 0; rank < timeline.ranks; rank++) {
    if (timeline.blocked) drawWaits(rank);
    if (timeline.memory) drawStrip(rank);
  }
  lookAgain();
  const part = `${nearText(view.from)} to ${nearText(view.to)} of ${timeText(timeline.length, timeline.length * 5e-4 || 1)}`;
  root.querySelector('.shown').textContent = `shown: ${part}${unitText}`;
}

// Clears the canvas and gives it one pixel for each pixel of the screen, up to the limit of browsers.
function fitCanvas(context) {
  const {canvas} = context, {width, height} = layout;
  const ratio = Math.min(window.devicePixelRatio || 1, 16000 / height);
  const wide = Math.round(width * ratio), high = Math.round(height * ratio);
  if (canvas.width !== wide || canvas.height !== high) {
    [canvas.width, canvas.height, canvas.style.height] = [wide, high, `${height}px`];
  }
  context.setTransform(wide / width, 0, 0, high / height, 0, 0);
  context.clearRect(0, 0, width, height);
  context.textBaseline = 'middle';
}

// A colour of the style sheet, for light or dark.
function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`);
}

function write(context, text, x, y, {align = 'left', fill = colour('faint'), font = `11.5px ${SANS}`} = {}) {
  context.font = font;
  context.fillStyle = fill;
  context.textAlign = align;
  context.fillText(text, x, y);
}

// Round times, at most one for every 80 pixels.
function drawAxis() {
  const {left, right, top, bottom, memory, end} = layout;
  const shown = (view.to - view.from) * timeline.tick, marks = Math.max((right - left) / 80, 2);
  const power = 10 ** Math.floor(Math.log10(shown / marks || 1));
  const step = power * [1, 2, 5, 10].find((factor) => power * factor * marks >= shown * 0.999999);
  base.strokeStyle = colour('grid');
  base.lineWidth = 1;
  base.beginPath();
  const first = Math.ceil(view.from * timeline.tick / step - 1e-9);
  for (let mark = first; ; mark++) {
    const tick = mark * step / timeline.tick;
    if (!(tick <= view.to * (1 + 1e-12))) break;
    const x = Math.round(xOf(tick)) + 0.5;
    base.moveTo(x, top);
    base.lineTo(x, bottom + 5);
    if (end > memory) base.moveTo(x, memory - 4);
    if (end > memory) base.lineTo(x, end);
    write(base, timeText(tick) + (mark === first ? unitText : ''), x, bottom + 15, {align: 'center'});
  }
  base.stroke();
  if (!timeline.memory) return;
  write(base, 'held, in micro-batches of one rank', left, memory - 14);
  write(base, 'peak', right + 6, memory - 14);
}

function drawRows() {
  const {left, right, width, rowHeight} = layout;
  const columns = Math.round((right - left) * base.canvas.width / width);
  const image = new ImageData(columns, timeline.ranks);
  const track = colour('track');
  let blended = false;
  for (let rank = 0; rank < timeline.ranks; rank++) {
    base.fillStyle = track;
    base.fillRect(left, rowTop(rank), right - left, rowHeight);
    writeRank(rank, rowTop(rank) + rowHeight / 2);
    blended = drawCells(rank, image) || blended;
  }
  if (!blended) return;
  blend.canvas.width = columns;
  blend.canvas.height = timeline.ranks;
  blend.putImageData(image, 0, 0);
  base.imageSmoothingEnabled = false;
  for (let rank = 0; rank < timeline.ranks; rank++) {
    base.drawImage(blend.canvas, 0, rank, columns, 1, left, rowTop(rank), right - left, rowHeight);
  }
}

function writeRank(rank, y) {
  const label = timeline.labels[rank], text = layout.left > 40 ? label : label.replace('rank ', '');
  write(base, text, layout.left - 8, y, {align: 'right'});
}

// Draws a rank's cells, narrow ones into its row of `image`. Returns whether there were any narrow ones.
function drawCells(rank, image) {
  const {start, end, kind, microbatch} = timeline.cells, last = timeline.first[rank + 1];
  const scale = pixelsPerTick(), columns = image.width;
  const fine = columns / (view.to - view.from);  // columns of the image per tick
  const mixed = new Float32Array(columns * 4);  // for each column: red, green, blue, and the part that is covered
  let narrow = false;
  for (let cell = cellAfter(rank, view.from); cell < last && start[cell] < view.to; cell++) {
    if ((end[cell] - start[cell]) * scale >= NARROW) {
      drawCell(base, cell);
      continue;
    }
    narrow = true;
    const rgb = timeline.colours[kind[cell]][microbatch[cell]];
    const right = Math.min((end[cell] - view.from) * fine, columns);
    let x = Math.max((start[cell] - view.from) * fine, 0);
    while (x < right) {
      const column = Math.floor(x), next = Math.min(column + 1, right), part = next - x;
      mixed[4 * column] += part * (rgb >> 16);
      mixed[4 * column + 1] += part * (rgb >> 8 & 255);
      mixed[4 * column + 2] += part * (rgb & 255);
      mixed[4 * column + 3] += part;
      x = next;
    }
  }
  if (narrow) {
    for (let at = 0, pixel = rank * columns * 4; at < mixed.length; at += 4, pixel += 4) {
      const covered = mixed[at + 3];
      if (!covered) continue;
      for (let part = 0; part < 3; part++) image.data[pixel + part] = mixed[at + part] / covered;
      image.data[pixel + 3] = 255 * covered;
    }
  }
  return narrow;
}

// Draws the part of a cell that is in view, at least `least` pixels wide.
function drawCell(context, cell, least = 0) {
  const {start, end, kind, microbatch} = timeline.cells;
  const from = Math.max(xOf(start[cell]), layout.left), to = Math.min(xOf(end[cell]), layout.right);
  const gap = Math.min(1.5, (to - from) / 8), wide = Math.max(to - from - gap, least);
  const x = from + gap / 2, y = cellTop(cell), height = layout.cellHeight;
  context.fillStyle = timeline.kinds[kind[cell]][2][microbatch[cell]];
  if (wide < 8) {
    context.fillRect(x, y, wide, height);
    return;
  }
  context.beginPath();
  context.roundRect(x, y, wide, height, Math.min(4.5, wide / 4, height / 4));
  context.fill();
  const text = height < 10 ? '' : labelOf(cell, wide), style = {align: 'center', fill: ON_CELL, font: BOLD};
  if (text) write(context, text, x + wide / 2, y + height / 2 + 0.5, style);
}

// The longest form of a cell's name that fits: all of it, the number of its micro-batch, or nothing.
function labelOf(cell, wide) {
  const many = timeline.lanes > 1;
  if (!labels.size) {
    base.font = BOLD;
    const longest = String(timeline.microbatches - 1), stage = many ? String(timeline.stages - 1) : '';
    labels.set('whole', base.measureText(`${stage}W${longest}`).width + 4);
    labels.set('number', base.measureText(longest).width + 4);
  }
  if (wide >= labels.get('whole')) return nameOf(cell, many);
  return wide >= labels.get('number') ? String(timeline.cells.microbatch[cell]) : '';
}

// The waits of a rank for communication, in the colour of the axis, below its cells.
function drawWaits(rank) {
  const {axis, start, end} = timeline.blocked[rank], y = rowTop(rank) + layout.rowHeight + 1;
  const [low, high] = blockedWithin(rank, view.from, view.to);
  for (let at = low; at < high; at++) {
    const from = Math.max(xOf(start[at]), layout.left), to = Math.min(xOf(end[at]), layout.right);
    base.fillStyle = colour(timeline.axes[axis[at]][1]);
    base.fillRect(from, y, to - from, layout.lane - 2);
  }
}

// The memory of a rank as an area; each pixel shows the largest value within it.
function drawStrip(rank) {
  const {left, right, stripHeight} = layout, {ticks, held} = timeline.memory[rank];
  const floor = stripTop(rank) + stripHeight, highest = Math.max(...timeline.peak) || 1;
  const yOf = (units) => floor - units * timeline.unit / highest * (stripHeight - 2);
  base.fillStyle = colour('track');
  base.fillRect(left, stripTop(rank), right - left, stripHeight);
  const line = [];
  let at = firstWhere(0, ticks.length, (step) => ticks[step] > view.from);
  let level = at > 0 ? held[at - 1] : 0;
  line.push([left, yOf(level)]);
  for (; at < ticks.length && ticks[at] < view.to; at++) {
    const x = xOf(ticks[at]), pixel = tickAt(x + 1);
    let most = held[at];
    line.push([x, yOf(level)]);
    while (at + 1 < ticks.length && ticks[at + 1] < pixel) most = Math.max(most, held[++at]);
    level = held[at];
    line.push([x, yOf(most)]);
    if (most > level) line.push([x + 1, yOf(most)], [x + 1, yOf(level)]);
  }
  line.push([right, yOf(level)]);
  base.beginPath();
  for (const [x, y] of line) base.lineTo(x, y);
  base.strokeStyle = colour('edge');
  base.stroke();
  base.lineTo(right, floor);
  base.lineTo(left, floor);
  base.fillStyle = colour('held');
  base.fill();
  writeRank(rank, floor - stripHeight / 2);
  write(base, numberText(timeline.peak[rank]), right + 6, floor - stripHeight / 2);
}
