'use strict';

// The charts over the steps: one uPlot each, zoomed together. `report` is what page.py wrote.

const report = JSON.parse(document.getElementById('data').textContent);
const MANY = 200;  // steps from which a running mean is drawn
const WHOLE = [1, 10, 100, 1e3, 1e4, 1e5, 1e6, 1e7].flatMap((power) => [power, 2 * power, 5 * power]);
const plots = [];
const firsts = report.runs.map((run) => run.steps[0]), lasts = report.runs.map((run) => run.steps.at(-1));
const span = [Math.min(...firsts), Math.max(...lasts, Math.min(...firsts) + 1)];  // of the steps of all runs

const formats = {
  number: (value) => String(Number(value.toPrecision(6))),
  bytes: (value) => scaled(value, [[1e12, 'TB'], [1e9, 'GB'], [1e6, 'MB'], [1e3, 'kB'], [1, 'bytes']]),
  seconds: (value) => scaled(value, [[1, 's'], [1e-3, 'ms'], [1e-6, 'µs']]),
  percent: (value) => `${Number((100 * value).toPrecision(4))} %`,
};

function scaled(value, units) {
  if (!value) return '0';
  const [size, unit] = units.find(([least]) => Math.abs(value) >= least) ?? units.at(-1);
  return `${Number((value / size).toPrecision(6))} ${unit}`;
}

// A colour of the style sheet, for light or dark.
function colour(name, opacity = 1) {
  const text = getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  return opacity === 1 ? text : text + Math.round(255 * opacity).toString(16).padStart(2, '0');
}

// The mean of up to `width` numbers around each, without those that are missing.
function runningMean(values, width) {
  const sums = [0], counts = [0];
  for (const value of values) {
    sums.push(sums.at(-1) + (value ?? 0));
    counts.push(counts.at(-1) + (value == null ? 0 : 1));
  }
  const half = width >> 1;
  return values.map((_, at) => {
    const low = Math.max(0, at - half), high = Math.min(values.length, at + half + 1);
    const count = counts[high] - counts[low];
    return count ? (sums[high] - sums[low]) / count : null;
  });
}

// The curves of a chart: for each a label, its steps and values, and how it is drawn.
function curvesOf(chart) {
  const curves = [];
  report.runs.forEach((run, number) => {
    const several = report.runs.length > 1;
    const name = (label) => (several ? [run.name, label].filter(Boolean).join(', ') : label || chart.title.toLowerCase());
    chart.series.forEach((series, position) => {
      const values = run.columns[series.key];
      if (!values) return;
      const hue = several ? number : position;
      const dash = several && position ? [5, 4] : undefined;
      const smoothed = chart.smooth && !series.points && run.steps.length > MANY;
      curves.push({label: name(series.label), hue, values, steps: run.steps, dash, points: series.points,
                   faint: smoothed, width: smoothed ? 1 : 1.6});
      if (!smoothed) return;
      const width = 2 * Math.round(run.steps.length / 120) + 1;
      curves.push({label: name([series.label, `mean of ${width}`].filter(Boolean).join(', ')), hue, width: 2,
                   values: runningMean(values, width), steps: run.steps});
    });
  });
  for (const line of chart.lines) {
    const {steps, name} = report.runs[line.run];
    const ends = [steps[0], steps.at(-1)];
    curves.push({label: report.runs.length > 1 ? `${name}, ${line.label}` : line.label, steps: ends,
                 values: [line.value, line.value], hue: report.runs.length > 1 ? line.run : 'line',
                 dash: [2, 4], width: 1.5, constant: true});
  }
  return curves;
}

function build(chart, place, logarithmic) {
  const curves = curvesOf(chart), format = formats[chart.format];
  const constants = chart.lines.map(({value}) => value);
  const data = uPlot.join(curves.map(({steps, values}) => [steps, values]));
  const axis = {
    stroke: () => colour('faint'), grid: {stroke: () => colour('grid'), width: 1}, ticks: {show: false},
    font: '11.5px system-ui, sans-serif',
  };
  const options = {
    width: place.clientWidth, height: 220,
    cursor: {sync: {key: 'steps'}, drag: {x: true, y: false}, points: {size: 6}},
    scales: {x: {time: false, range: stepsOf}, y: logarithmic ? {distr: 3} : {range: rangeWith(chart.format === 'bytes' ? [...constants, 0] : constants)}},
    axes: [
      {...axis, size: 26, incrs: WHOLE, values: (_, ticks) => ticks.map((step) => step.toLocaleString('en'))},
      {...axis, size: 66, values: (_, ticks) => ticks.map((value) => (value == null ? '' : format(value)))},
    ],
    series: [{label: 'step'}, ...curves.map((curve) => ({
      label: curve.label, width: curve.width, dash: curve.dash, spanGaps: true, auto: !curve.constant,
      stroke: () => colour(`series-${curve.hue}`, curve.faint ? 0.4 : 1),
      points: curve.points ? {show: true, size: 7, fill: () => colour('page')} : {show: curve.steps.length === 1},
      value: (_, value) => (value == null ? '–' : format(value)),
    }))],
    hooks: {setScale: [zoomOthers], setCursor: [showLast], drawAxes: [markResumptions]},
  };
  const plot = new uPlot(options, data, place);
  showLast(plot);
  return plot;
}

// The steps that are shown: what was chosen, or those of all runs where a chart would show its own.
function stepsOf({data: [steps]}, least, most) {
  return least === steps[0] && most === steps.at(-1) ? span : [least, most];
}

// The range of an axis: a little more than the numbers, with 0 and with those of the constants that are near; a
// constant 0 always.
function rangeWith(constants) {
  return (_, least, most) => {
    if (least == null) return [0, 1];
    const near = constants.filter((value) => !value || (value < 4 * most && value > least / 4));
    return rangeOf(Math.min(least, ...near), Math.max(most, ...near));
  };
}

function rangeOf(least, most) {
  const margin = (most - least || Math.abs(most) || 1) * 0.08;
  const low = least >= 0 && least < 0.35 * most ? 0 : least - margin;
  return [low, most + margin];
}

// A vertical line where a run was resumed from a checkpoint.
function markResumptions({ctx, bbox, valToPos}) {
  ctx.save();
  ctx.strokeStyle = colour('faint');
  ctx.setLineDash([2, 3]);
  for (const step of report.runs.flatMap(({resumed}) => resumed)) {
    const x = Math.round(valToPos(step + 0.5, 'x', true));
    if (x < bbox.left || x > bbox.left + bbox.width) continue;
    ctx.beginPath();
    ctx.moveTo(x, bbox.top);
    ctx.lineTo(x, bbox.top + bbox.height);
    ctx.stroke();
  }
  ctx.restore();
}

// Without a step that is pointed at, the legend has the last one's numbers.
function showLast(plot) {
  if (plot.cursor.idx == null) plot.setLegend({idx: plot.data[0].length - 1});
}

let zooming = false;

function zoomOthers(plot, key) {
  if (key !== 'x' || zooming || !plots.includes(plot)) return;
  const {min, max} = plot.scales.x;
  zooming = true;
  for (const other of plots) if (other !== plot) other.setScale('x', {min, max});
  zooming = false;
}

report.charts.forEach((chart, number) => {
  const figure = document.getElementById(`chart-${number}`), place = figure.querySelector('div');
  plots.push(build(chart, place, false));
  const button = figure.querySelector('.log');
  button?.addEventListener('click', () => {
    const pressed = button.getAttribute('aria-pressed') !== 'true', {min, max} = plots[number].scales.x;
    button.setAttribute('aria-pressed', pressed);
    plots[number].destroy();
    plots[number] = build(chart, place, pressed);
    plots[number].setScale('x', {min, max});
  });
});

new ResizeObserver(() => {
  for (const plot of plots) {
    const width = plot.root.parentElement.clientWidth;
    if (width && width !== plot.width) plot.setSize({width, height: plot.height});
  }
}).observe(document.body);
window.matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => {
  for (const plot of plots) plot.redraw(false);
});
