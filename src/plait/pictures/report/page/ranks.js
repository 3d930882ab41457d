'use strict';

// For each run the map of its ranks over the steps, drawn by uPlot's axes and zoomed with the charts; and the
// timeline of its recorded step.

// Stops of a scale from few to many that is even in lightness and legible without red or without green
// (cividis, Nuñez et al. 2018).
const SCALE = [[0, 34, 78], [53, 69, 108], [102, 105, 112], [148, 142, 119], [200, 184, 102], [254, 232, 56]];
const drawn = [];

function shadeOf(part) {
  const at = Math.min(Math.max(part, 0), 1) * (SCALE.length - 1), low = Math.min(Math.floor(at), SCALE.length - 2);
  const mix = SCALE[low].map((value, index) => Math.round(value + (at - low) * (SCALE[low + 1][index] - value)));
  return `rgb(${mix.join(',')})`;
}

// The values below and above which hundredths of all lie: the ends of the scale.
function endsOf(values) {
  const all = values.flat().sort((one, two) => one - two), hundredth = Math.floor(all.length / 100);
  return [all[hundredth], all[all.length - 1 - hundredth]];
}

function buildMap({ranks: map, steps: all}, place) {
  const {steps, values} = map, ranks = values.length, format = formats[map.format];
  const [least, most] = endsOf(values);
  const told = document.createElement('p');
  told.className = 'about';
  const before = steps[0] > all[0] ? ` Before step ${steps[0]} the run had other ranks.` : '';
  const idle = () => {
    told.textContent = `${map.what}: dark ${format(least)}, light ${format(most)}; point at a place for its number.${before}`;
  };
  idle();
  place.append(told);
  const draw = (plot) => {
    const {ctx, bbox} = plot, x = (step) => plot.valToPos(step, 'x', true), y = (rank) => plot.valToPos(rank, 'y', true);
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
    ctx.clip();
    values.forEach((row, rank) => row.forEach((value, at) => {
      const left = Math.round(x(steps[at] - 0.5)), right = Math.round(x(steps[at + 1] - 0.5));
      const top = Math.round(y(rank - 0.5)), bottom = Math.round(y(rank + 0.5));
      ctx.fillStyle = shadeOf(most > least ? (value - least) / (most - least) : 0.5);
      ctx.fillRect(left, top, right - left, bottom - top - (bottom - top > 8 ? 1 : 0));
    }));
    ctx.restore();
  };
  const point = (plot) => {
    const {left, top} = plot.cursor;
    if (!(left >= 0 && top >= 0)) return idle();
    const step = plot.posToVal(left, 'x'), rank = Math.round(plot.posToVal(top, 'y'));
    const at = steps.findLastIndex((first) => first - 0.5 <= step);
    if (at < 0 || at >= steps.length - 1 || !values[rank]) return idle();
    const last = steps[at + 1] - 1, where = last > steps[at] ? `steps ${steps[at]} to ${last}` : `step ${last}`;
    told.textContent = `rank ${rank}, ${where}: ${map.what} ${format(values[rank][at])}`;
  };
  const axis = {stroke: () => colour('faint'), grid: {show: false}, ticks: {show: false}, font: '11.5px system-ui, sans-serif'};
  const plot = new uPlot({
    width: place.clientWidth, height: Math.min(Math.max(22 * ranks, 80), 420) + 40, legend: {show: false},
    cursor: {sync: {key: 'steps', setSeries: false}, drag: {x: true, y: false}, points: {show: false}, y: false},
    scales: {x: {time: false, range: stepsOf}, y: {range: [-0.5, ranks - 0.5], dir: -1}},
    axes: [{...axis, size: 26, incrs: WHOLE}, {...axis, size: 66, incrs: [1, 2, 4, 8, 16, 32, 64, 128, 256, 512], values: (_, ticks) => ticks.map((rank) => `rank ${rank}`)}],
    series: [{}, {show: true, stroke: 'transparent', points: {show: false}}],
    hooks: {draw: [draw], setCursor: [point], setScale: [zoomOthers]},
  }, [span, [0, 0]], place);
  plots.push(plot);
}

report.runs.forEach((run, number) => {
  if (run.ranks) buildMap(run, document.getElementById(`ranks-${number}`));
  if (run.timeline) drawn.push(drawTimeline(document.getElementById(`timeline-${number}`), run.timeline, false));
});
