// The main chart: values over training with their bands, returns, and dots in the verdict's colour.

import { swatch } from './evaluation.js';
import { brief, defined, draw, frame, make, path, thinned, ticks } from './svg.js';

const HEIGHT = 380;
const MARGIN = { left: 58, right: 18, top: 24, bottom: 40 };
const DASHES = { provisional: '6 4', return: '1.5 3', estimate: '' };
const VERDICTS = ['red', 'amber', 'green'];

/**
 * Draw lines over steps.
 *
 * A line is {run, called, name, label, kind, colour, points: [{step, value, low, high, verdict}], strong, faint}.
 * Kinds are estimate, settled, provisional, fresh, return. `select` is called with the run and the
 * step that were clicked.
 */
export function trainingChart(host, lines, { selected, select, bands }) {
  const width = Math.max(host.clientWidth, 320);
  const limits = rangeOf(lines, bands);
  const chart = frame({
    width, height: HEIGHT, margin: MARGIN, x: limits.x, y: limits.y,
    xTicks: ticks(...limits.x, Math.max(2, width / 130)).filter(Number.isInteger),
    yTicks: ticks(...limits.y, 7), xTitle: 'step of the training', yTitle: 'value of the policy', label: 'Value over training',
  });
  const { svg, toX, toY, clip, area } = chart;
  svg.setAttribute('height', HEIGHT);
  const place = (line) => line.points.map((p) => ({ ...p, x: toX(p.step), y: toY(p.value) }));
  const drawn = lines.map((line) => ({ ...line, points: place(line) }));
  mark(svg, selected, chart);
  const plot = draw('g', { 'clip-path': clip }, svg);
  for (const line of drawn) if (line.kind !== 'fresh' && bands(line)) band(plot, line, toY);
  for (const line of drawn) if (line.kind !== 'fresh' || line.alone) stroke(plot, line);
  const marks = draw('g', { 'clip-path': clip }, svg);
  for (const line of drawn) {
    if (line.kind === 'fresh') whiskers(marks, line, toY);
    else if (line.kind !== 'return') dots(marks, line);
  }
  const cut = drawn.some((line) => bands(line) && line.points.some(
    (p) => (p.high ?? p.value) > limits.y[1] || (p.low ?? p.value) < limits.y[0]));
  if (cut) {
    draw('text', { class: 'title', x: area.right, y: 12, 'text-anchor': 'end' }, svg,
      'wide bands are cut at the edge');
  }
  const focused = host.contains(document.activeElement);
  host.replaceChildren(svg);
  follow(host, chart, drawn, select, selected?.step);
  if (focused) svg.focus();
}

/** Return limits of steps and values; a band may reach as far again as the values do, no more. */
function rangeOf(lines, bands) {
  const points = lines.flatMap((line) => line.points);
  const steps = points.map((p) => p.step);
  let [left, right] = [min(steps), max(steps)];
  const side = 0.012 * (right - left) || 1;  // so that marks at the ends are whole
  [left, right] = [left - side, right + side];
  const values = points.map((p) => p.value);
  let [low, high] = [min(values), max(values)];
  const reach = high - low || Infinity;  // of a single value all of the band
  const banded = lines.filter(bands).flatMap((line) => line.points);
  const ends = (key) => banded.map((p) => p[key]).filter((v) => v !== null && v !== undefined);
  low = Math.min(low, Math.max(min([low, ...ends('low')]), low - reach));
  high = Math.max(high, Math.min(max([high, ...ends('high')]), high + reach));
  const air = 0.04 * (high - low || 1);
  return { x: [left, right], y: [low - air, high + air] };
}

// spread over arguments would overflow the stack with many points
const min = (numbers) => numbers.reduce((a, b) => Math.min(a, b), Infinity);
const max = (numbers) => numbers.reduce((a, b) => Math.max(a, b), -Infinity);

function band(plot, line, toY) {
  const points = line.points.filter((p) => defined(p.low) && defined(p.high));
  if (points.length === 0) return;
  const clamp = (y) => Math.max(-1e4, Math.min(1e4, y));
  const upper = points.map((p) => ({ x: p.x, y: clamp(toY(p.high)) }));
  const lower = points.map((p) => ({ x: p.x, y: clamp(toY(p.low)) })).reverse();
  if (points.length === 1) {  // a single evaluation has a whisker
    draw('path', { class: 'whisker', d: path([upper[0], lower[0]]), stroke: line.colour }, plot);
    return;
  }
  draw('path', {
    class: 'band', d: `${path(upper)}L${path(lower).slice(1)}Z`, fill: line.colour,
    'data-series': line.name, 'data-run': line.run,
    opacity: line.kind === 'provisional' ? 0.1 : 0.2,
  }, plot);
}

function stroke(plot, line) {
  if (line.points.length === 1) {
    const [{ x, y }] = line.points;
    draw('circle', { class: 'alone', cx: x, cy: y, r: 4, fill: line.colour }, plot);
  }
  draw('path', {
    class: `line ${line.kind}`, d: path(line.points), stroke: line.colour, fill: 'none',
    'stroke-width': line.faint ? 1 : line.kind === 'return' || line.points.length > 300 ? 1.5 : line.strong ? 2.4 : 1.8,
    'stroke-dasharray': line.dash ?? DASHES[line.kind] ?? '',
    'data-series': line.name, 'data-run': line.run, opacity: line.faint ? 0.7 : line.strong ? 1 : 0.85,
  }, plot);
}

/** Draw a dot at each evaluation with a verdict, as long as there is room. */
function dots(marks, line) {
  const judged = line.points.filter((p) => VERDICTS[p.verdict]);
  const shown = thinned(judged, judged.length > 60 ? 7 : 0);
  for (const p of shown) {
    draw('circle', {
      class: `dot ${VERDICTS[p.verdict]}`, cx: p.x, cy: p.y, r: judged.length > 60 ? 2.6 : 4.2,
      'data-series': line.name, 'data-run': line.run, 'data-step': p.step,
    }, marks);
  }
}

/** Draw fresh evaluations as diamonds with whiskers. */
function whiskers(marks, line, toY) {
  for (const p of thinned(line.points, line.points.length > 60 ? 6 : 0)) {
    if (defined(p.low) && defined(p.high)) {
      draw('path', {
        class: 'whisker', stroke: line.colour,
        d: path([{ x: p.x, y: toY(p.high) }, { x: p.x, y: toY(p.low) }]),
      }, marks);
    }
    draw('path', {
      class: 'fresh', fill: line.colour, 'data-series': line.name, 'data-run': line.run,
      d: `M${p.x} ${p.y - 6}l5 6l-5 6l-5 -6Z`,
    }, marks);
  }
}

function mark(svg, selected, { toX, area }) {
  if (!selected || !defined(selected.step)) return;
  const at = toX(selected.step);
  if (at < area.left - 1 || at > area.right + 1) return;
  draw('line', { class: 'selected', x1: at, x2: at, y1: area.top, y2: area.bottom }, svg);
}

/** Show what is under the pointer; choose a step by a click, or by the arrow keys and Enter. */
function follow(host, { svg, area }, lines, select, step) {
  const tip = make('div', { class: 'tip', hidden: true });
  host.append(tip);
  const rule = draw('line', { class: 'hover', y1: area.top, y2: area.bottom, opacity: 0 }, svg);
  const estimates = lines.filter((line) => line.kind !== 'return');
  const candidates = estimates.length ? estimates : lines;
  const at = (event) => {
    const box = svg.getBoundingClientRect();
    return { x: event.clientX - box.left, y: event.clientY - box.top };
  };
  const show = (near) => {
    if (!near) return;
    rule.setAttribute('x1', near.x);
    rule.setAttribute('x2', near.x);
    rule.setAttribute('opacity', 1);
    light(host, near.line.run);
    tip.hidden = false;
    tip.replaceChildren(...words(lines, near.step, near.line));
    const left = near.x + 14 + tip.offsetWidth > area.right ? near.x - 14 - tip.offsetWidth : near.x + 14;
    tip.style.left = `${Math.max(0, left)}px`;
    tip.style.top = `${area.top + 4}px`;
  };
  const hide = () => {
    light(host, null);
    tip.hidden = true;
    rule.setAttribute('opacity', 0);
  };
  svg.addEventListener('mousemove', (event) => show(nearest(lines, at(event), 1)));
  svg.addEventListener('mouseleave', hide);
  svg.addEventListener('click', (event) => {
    const near = nearest(candidates, at(event), 0.3);
    if (near) select(near.line.run, near.step);
  });
  const main = candidates.find((line) => line.strong && line.kind !== 'fresh') ?? candidates[0];
  svg.setAttribute('tabindex', 0);
  svg.addEventListener('blur', hide);
  svg.addEventListener('keydown', (event) => {
    const last = main.points.length - 1;
    const now = main.points.findIndex((p) => p.step === step);
    const next = {
      ArrowLeft: now < 0 ? last : Math.max(now - 1, 0), ArrowRight: now < 0 ? last : Math.min(now + 1, last), Home: 0, End: last,
    }[event.key];
    if (next !== undefined) {
      step = main.points[next].step;
      show({ ...main.points[next], line: main });
    } else if (event.key === 'Enter' && now >= 0) {
      select(main.run, step);
    } else return;
    event.preventDefault();
  });
}

/** Draw the lines of one run, if there are several, as if nothing else were there. */
export function light(host, run) {
  const all = [...host.querySelectorAll('path.line')];
  const several = new Set(all.map((line) => line.dataset.run)).size > 1;
  for (const line of all) line.classList.toggle('lit', several && line.dataset.run === run);
}

/** Return the point nearest to the pointer; height counts less than the step. */
function nearest(lines, pointer, weight) {
  let best = null;
  for (const line of lines) {
    for (const p of line.points) {
      const away = (p.x - pointer.x) ** 2 + weight * 0.05 * (p.y - pointer.y) ** 2;
      if (!best || away < best.away) best = { away, x: p.x, step: p.step, line };
    }
  }
  return best;
}

function words(lines, step, focus) {
  const rows = [];
  const one = new Set(lines.map((line) => line.run)).size === 1;
  for (const line of lines) {
    const p = line.points.find((point) => point.step === step);
    if (!p) continue;
    const ends = defined(p.low) && defined(p.high) ? ` (${brief(p.low)} to ${brief(p.high)})` : '';
    const name = one ? line.label : `${line.called} · ${line.label}`;
    rows.push({ line, row: make('div', {}, swatch(line.colour),
      make('span', {}, name), make('b', {}, `${brief(p.value)}${ends}`)) });
  }
  rows.sort((a, b) => (b.line === focus) - (a.line === focus));
  const shown = rows.slice(0, 8).map(({ row }) => row);
  if (rows.length > 8) shown.push(make('div', { class: 'quiet' }, `and ${rows.length - 8} more`));
  return [make('div', { class: 'quiet' }, `step ${step.toLocaleString('en')}`), ...shown];
}
