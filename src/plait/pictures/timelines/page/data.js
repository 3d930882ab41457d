// The timeline, unpacked from `packed`, as page_timeline.py wrote it. Rows are ranks, of one pipeline or of
// several; cells have consecutive numbers, row after row, and each of their properties is an array; times are
// in ticks.

const KINDS = {forward: 0, backward: 1, input: 2, weight: 3};
const timeline = unpack(packed);

function unpack(data) {
  const ranks = data.cells.length, stages = data.rankOf.length;
  const count = data.cells.reduce((sum, row) => sum + row.length / 5, 0);
  const cells = {
    rank: new Int32Array(count), stage: new Int32Array(count), kind: new Uint8Array(count),
    microbatch: new Int32Array(count), start: new Float64Array(count), end: new Float64Array(count),
  };
  const first = new Int32Array(ranks + 1);  // first cell of each rank
  const pipelines = Math.max(...data.pipelineOf) + 1;
  const place = new Int32Array(pipelines * data.microbatches * stages * 3).fill(-1);  // see placeOf
  let cell = 0;
  data.cells.forEach((row, rank) => {
    let time = 0;
    for (let at = 0; at < row.length; at += 5, cell++) {
      const [stage, kind, microbatch, idle, duration] = row.slice(at, at + 5);
      cells.rank[cell] = rank;
      cells.stage[cell] = stage;
      cells.kind[cell] = kind;
      cells.microbatch[cell] = microbatch;
      cells.start[cell] = time + idle;
      cells.end[cell] = time += idle + duration;
      place[((data.pipelineOf[rank] * data.microbatches + microbatch) * stages + stage) * 3 + roleOf(kind)] = cell;
    }
    first[rank + 1] = cell;
  });
  const laneOf = data.rankOf.map((rank, stage) => data.rankOf.slice(0, stage).filter((other) => other === rank).length);
  const durations = cells.end.map((end, at) => end - cells.start[at]);
  return {
    ...data, ranks, stages, cells, first, place, laneOf,  // laneOf: each stage's place among those of its rank
    lanes: Math.max(...laneOf) + 1,
    shortest: durations.reduce((least, time) => (time > 0 && time < least ? time : least), data.length || 1),
    colours: data.kinds.map(([, , shades]) => shades.map((shade) => parseInt(shade.slice(1), 16))),
    memory: data.memory && data.memory.map(unpackMemory),
    blocked: data.blocked && data.blocked.map(unpackBlocked),
  };
}

function unpackMemory(row) {
  const ticks = new Float64Array(row.length / 2), held = new Float64Array(row.length / 2);
  for (let at = 0, time = 0; at < ticks.length; at++) {
    ticks[at] = time += row[2 * at];
    held[at] = row[2 * at + 1];
  }
  return {ticks, held};
}

function unpackBlocked(row) {
  const count = row.length / 3;
  const spans = {axis: new Int32Array(count), start: new Float64Array(count), end: new Float64Array(count)};
  for (let at = 0, time = 0; at < count; at++) {
    spans.axis[at] = row[3 * at];
    spans.start[at] = time + row[3 * at + 1];
    spans.end[at] = time += row[3 * at + 1] + row[3 * at + 2];
  }
  return spans;
}

// Forward, input gradient (in a full backward too), weight gradient.
function roleOf(kind) {
  return kind === KINDS.forward ? 0 : kind === KINDS.weight ? 2 : 1;
}

// Where the cells of the micro-batch of a cell begin in `place`, in which they are next to each other.
function batchOf(cell) {
  const {rank, microbatch} = timeline.cells;
  return timeline.pipelineOf[rank[cell]] * timeline.microbatches + microbatch[cell];
}

// The cell of an action of the same micro-batch, or -1.
function placeOf(cell, stage, role) {
  return timeline.place[(batchOf(cell) * timeline.stages + stage) * 3 + role];
}

// All cells of the same micro-batch.
function alike(cell) {
  const size = timeline.stages * 3, first = batchOf(cell) * size;
  return timeline.place.subarray(first, first + size).filter((other) => other >= 0);
}

// The cell whose result this one needs, or -1.
function sourceOf(cell) {
  const {kind, stage} = timeline.cells, here = stage[cell];
  if (kind[cell] === KINDS.forward) return here > 0 ? placeOf(cell, here - 1, 0) : -1;
  if (kind[cell] === KINDS.weight) return placeOf(cell, here, 1);
  return here + 1 < timeline.stages ? placeOf(cell, here + 1, 1) : placeOf(cell, here, 0);
}

// Time at which the result of `source` arrives on the rank of `cell`.
function arrival(source, cell) {
  const {rank, end} = timeline.cells;
  return end[source] + (rank[source] === rank[cell] ? 0 : timeline.hop);
}

function middleOf(cell) {
  return (timeline.cells.start[cell] + timeline.cells.end[cell]) / 2;
}

// Idle time of the rank before this cell.
function idleBefore(cell) {
  const {rank, start, end} = timeline.cells;
  return start[cell] - (cell > timeline.first[rank[cell]] ? end[cell - 1] : 0);
}

// The first index from `low` to `high` for which `test` is true; it must be false before and true after.
function firstWhere(low, high, test) {
  while (low < high) {
    const middle = (low + high) >> 1;
    if (test(middle)) high = middle;
    else low = middle + 1;
  }
  return low;
}

// The first cell of a rank that ends after `tick`; if there is none, the number after its last.
function cellAfter(rank, tick) {
  const {first, cells} = timeline;
  return firstWhere(first[rank], first[rank + 1], (cell) => cells.end[cell] > tick);
}

// Memory of a rank at `tick`, in units of one rank's micro-batch.
function heldAt(rank, tick) {
  const {ticks, held} = timeline.memory[rank];
  const next = firstWhere(0, ticks.length, (at) => ticks[at] > tick);
  return next > 0 ? held[next - 1] * timeline.unit : 0;
}

// The waits of a rank that overlap a time: the first, and the number after the last.
function blockedWithin(rank, from, to) {
  const {start, end} = timeline.blocked[rank];
  const low = firstWhere(0, end.length, (at) => end[at] > from);
  return [low, firstWhere(low, start.length, (at) => start[at] >= to)];
}

// An action as text: 2F13, or F13 where each rank has one stage.
function nameOf(cell, withStage) {
  const {stage, kind, microbatch} = timeline.cells;
  return `${withStage ? stage[cell] : ''}${timeline.kinds[kind[cell]][0]}${microbatch[cell]}`;
}

// Ticks in the unit of the costs, with the digits needed to distinguish times `finest` ticks apart.
function timeText(ticks, finest = (timeline.length || 1) * 1e-7) {
  const time = ticks * timeline.tick;
  const magnitude = (value) => Math.floor(Math.log10(value));
  const digits = time ? magnitude(Math.abs(time)) - magnitude(finest * timeline.tick) + 1 : 0;
  return digits < 1 ? '0' : String(Number(time.toPrecision(Math.min(digits, 15))));
}

// The unit of times, where they have one, after a space.
const unitText = timeline.timeUnit && ` ${timeline.timeUnit}`;

function withUnit(ticks) {
  return timeText(ticks) + unitText;
}

function numberText(value) {
  return String(Number(value.toPrecision(6)));
}
