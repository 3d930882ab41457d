// The chosen cell: a second canvas highlights its micro-batch, a tooltip shows its details.

const hint = root.querySelector('.hint');
const glass = root.querySelector('.glass').getContext('2d');
let chosen = -1;  // the cell, or -1
let pointer = null;  // position of the mouse on the chart

function drawGlass() {
  fitCanvas(glass);
  const {left, right, top, bottom, end} = layout;
  if (chosen >= 0) {
    glass.globalAlpha = 0.68;
    glass.fillStyle = colour('page');
    glass.fillRect(left, top, right - left, bottom - top);
    glass.globalAlpha = 1;
    for (const cell of alike(chosen)) {
      if (isShown(cell)) drawCell(glass, cell, 2);
    }
    drawChosen();
  }
  if (pointer && pointer.x >= left && pointer.x <= right) {
    glass.fillStyle = colour('faint');
    glass.fillRect(Math.round(pointer.x), top, 1, end - top);
  }
}

// A frame around the chosen cell, and a line from the action on another rank that sent its input.
function drawChosen() {
  const {rank, start, end} = timeline.cells, {left, right, cellHeight} = layout;
  const x = xOf(start[chosen]), middle = cellHeight / 2, source = sourceOf(chosen);
  glass.save();
  glass.beginPath();
  glass.rect(left - 2, 0, right - left + 4, layout.height);
  glass.clip();
  glass.strokeStyle = glass.fillStyle = colour('ink');
  glass.lineWidth = 1.5;
  glass.strokeRect(x, cellTop(chosen), Math.max(xOf(end[chosen]) - x, 2), cellHeight);
  if (source >= 0 && rank[source] !== rank[chosen]) {
    const y = cellTop(chosen) + middle;
    glass.beginPath();
    glass.moveTo(xOf(end[source]), cellTop(source) + middle);
    glass.lineTo(x, y);
    glass.stroke();
    glass.beginPath();
    glass.arc(x, y, 3.5, 0, 2 * Math.PI);
    glass.fill();
  }
  glass.restore();
}

// Shows the tooltip for a position on the chart.
function lookAt(x, y) {
  pointer = {x, y};
  const row = rowAt(y), tick = tickAt(x);
  if (!row || x < layout.left || x > layout.right) {
    dismiss();
    return;
  }
  const cell = row.of === 'cells' ? cellAfter(row.rank, tick) : -1;
  const isCell = cell >= 0 && cell < timeline.first[row.rank + 1] && timeline.cells.start[cell] <= tick;
  chosen = isCell ? cell : -1;
  const about = isCell ? aboutCell(cell) : row.of === 'memory' ? aboutMemory(row.rank, tick)
    : row.of === 'waits' ? aboutWait(row.rank, tick) : aboutIdle(row.rank, cell);
  if (about) showCard(...about, x, y);
  else hint.hidden = true;
  drawGlass();
}

// Chooses a cell by keyboard.
function choose(cell) {
  pointer = null;
  reveal(cell);
  present(cell);
}

function present(cell) {
  const {rank, start, end} = timeline.cells;
  const x = (xOf(Math.max(start[cell], view.from)) + xOf(Math.min(end[cell], view.to))) / 2;
  chosen = cell;
  showCard(...aboutCell(cell), x, rowTop(rank[cell]) + layout.rowHeight);
  drawGlass();
}

// Updates the tooltip after the view has changed.
function lookAgain() {
  if (pointer) lookAt(pointer.x, pointer.y);
  else if (chosen >= 0 && isShown(chosen)) present(chosen);
  else dismiss();
}

function dismiss() {
  hint.hidden = true;
  chosen = -1;
  drawGlass();
}

// Each of these functions returns a headline and rows of names and values.

function aboutCell(cell) {
  const {rank, stage, kind, microbatch, start, end} = timeline.cells;
  const source = sourceOf(cell), idle = idleBefore(cell);
  const rows = [
    ['stage', `${stage[cell]}, on ${timeline.labels[rank[cell]]}`],
    ['micro-batch', microbatch[cell]],
    ['start', withUnit(start[cell])],
    ['end', withUnit(end[cell])],
    ['duration', withUnit(end[cell] - start[cell])],
  ];
  if (source >= 0) {
    const there = arrival(source, cell);
    const of = rank[source] === rank[cell] ? 'done here' : `of ${timeline.labels[rank[source]]}, arrived`;
    const waited = idle > 0 && there === start[cell];
    rows.push([waited ? 'waited for' : 'needed', `${nameOf(source, true)} ${of} at ${withUnit(there)}`]);
  }
  rows.push(['idle before', withUnit(idle)]);
  if (timeline.memory) rows.push(['held', heldText(rank[cell], start[cell])]);
  if (timeline.blocked) rows.push(...waitsWithin(cell));
  return [`${nameOf(cell, true)}  ${timeline.kinds[kind[cell]][1]}`, rows];
}

function aboutIdle(rank, next) {
  const {first, cells} = timeline;
  const from = next > first[rank] ? cells.end[next - 1] : 0;
  const to = next < first[rank + 1] ? cells.start[next] : full.to;
  const rows = [['from', withUnit(from)], ['to', withUnit(to)], ['duration', withUnit(to - from)]];
  if (next < first[rank + 1]) rows.push(['until', nameOf(next, true)]);
  return [`${timeline.labels[rank]} is idle`, rows];
}

// The wait of a rank at a time, or null.
function aboutWait(rank, tick) {
  const {axis, start, end} = timeline.blocked[rank], [at] = blockedWithin(rank, tick, tick + 1);
  if (at >= start.length || start[at] > tick) return null;
  const rows = [['from', withUnit(start[at])], ['to', withUnit(end[at])], ['duration', withUnit(end[at] - start[at])]];
  return [`${timeline.labels[rank]} is blocked in communication over ${timeline.axes[axis[at]][0]}`, rows];
}

// The time for which an action is blocked in communication, by axis.
function waitsWithin(cell) {
  const from = timeline.cells.start[cell], to = timeline.cells.end[cell], rank = timeline.cells.rank[cell];
  const {axis, start, end} = timeline.blocked[rank], [low, high] = blockedWithin(rank, from, to);
  const total = timeline.axes.map(() => 0);
  for (let at = low; at < high; at++) total[axis[at]] += Math.min(end[at], to) - Math.max(start[at], from);
  return timeline.axes.flatMap(([name], at) => (total[at] ? [[`blocked, ${name}`, withUnit(total[at])]] : []));
}

function aboutMemory(rank, tick) {
  return [`${timeline.labels[rank]} holds ${heldText(rank, tick)}`, [['at', `${nearText(tick)}${unitText}`]]];
}

function heldText(rank, tick) {
  return `${numberText(heldAt(rank, tick))} of at most ${numberText(timeline.peak[rank])}`;
}

// Shows the tooltip next to a position on the chart, within the window.
function showCard(headline, rows, x, y) {
  const head = document.createElement('strong'), list = document.createElement('dl');
  head.textContent = headline;
  for (const [word, value] of rows) {
    for (const [tag, text] of [['dt', word], ['dd', value]]) {
      const item = document.createElement(tag);
      item.textContent = text;
      list.append(item);
    }
  }
  hint.replaceChildren(head, list);
  hint.hidden = false;
  const {width, height} = hint.getBoundingClientRect(), chartTop = chart.getBoundingClientRect().top;
  const left = x + 16 + width > layout.width ? x - 16 - width : x + 16;
  const top = chartTop + y + 18 + height > window.innerHeight ? y - 18 - height : y + 18;
  hint.style.left = `${Math.max(left, 0)}px`;
  hint.style.top = `${Math.max(top, -chartTop)}px`;
}
