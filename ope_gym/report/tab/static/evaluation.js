// What is known of one evaluation: forest, reasons, effective sample size, weights, ranking.

import {
  bars, brief, defined, draw, frame, make, path, percent, pressable, scale, shorten, ticks,
} from './svg.js';

const WORDS = new Map([
  ['green', 'nothing visible speaks against it'], ['amber', 'use with care'], ['red', 'do not use this number'],
]);
const TONES = 6;  // colours of curves

/**
 * Return the cards of an evaluation and, if there is one, of a ranking.
 *
 * `free` are the values of the same policy from a training loop, if there are any: the evaluation is
 * then a second opinion.
 */
export function cards(evaluation, ranking, free = null) {
  const e = evaluation;
  if (!e) return ranking ? [rankingCard(ranking)] : [];
  return [
    card('forest', free ? 'From recorded episodes, with importance weights' : 'What the estimators say',
      `${free ? second(free) : ''}Data: ${e.regime}. ${e.explained}`, forest(e)),
    card('reasons', free ? 'How far to trust the importance weights' : 'How far to trust it', '', reasons(e)),
    e.ess && card('ess', 'How many episodes the weights leave',
      'effective sample size over the steps of an episode', essChart(e.ess)),
    e.concentration && card('concentration', 'How few episodes hold the weight',
      'share of the total weight in the heaviest episodes; dotted: if all had the same weight',
      concentrationChart(e.concentration)),
    e.behaviours && card('behaviours', 'Whose episodes they are',
      `their share of the weights of ${e.recommended} (bar) and of the episodes (tick)`,
      behaviours(e.behaviours)),
    e.overlap && card('overlap', 'Overlap of policies',
      '1: both make the same episodes equally likely, 0: nothing in common', overlap(e.overlap)),
    ranking && rankingCard(ranking),
  ].filter(Boolean);
}

/** Put cards into one column or, where there is room, by turns into two. */
export function arrange(host, made) {
  const columns = host.clientWidth > 860 ? 2 : 1;
  host.replaceChildren(...Array.from({ length: columns }, (_, column) => (
    make('div', {}, ...made.filter((_card, k) => k % columns === column)))));
}

/** Say why the evaluation is not the value above. */
const second = (free) => `Whole episodes of several policies, each counted by how likely this one makes it${
  free.provisional || free.settled ? '; usually far less sure than the value above, which learns from every step' : ''}. `;

export function card(id, title, note, ...content) {
  return make('section', { class: 'card', id: `card-${id}` }, make('h3', {}, title),
    note ? make('p', { class: 'quiet' }, note) : null, ...content);
}

export function badge(colour) {
  return make('span', { class: `badge ${colour}`, title: WORDS.get(colour) ?? '' }, colour);
}

// Forest ------------------------------------------------------------------------------

function forest(e) {
  const rows = e.estimates.map((row) => ({
    ...row, cells: [row.ess, row.fresh_episodes].map((count) => (defined(count) ? brief(count, 2) : '')),
  }));
  const svg = intervals(rows, {
    heads: ['ESS', 'fresh episodes'], truth: e.truth, best: e.recommended, cell: 98,
  });
  const notes = [`${level(e)} intervals (${e.method}); the last column says about how many fresh episodes would be as accurate`];
  if (e.truth) notes.push('dashed line: the value from fresh rollouts');
  if (e.left_out) notes.push(`${e.left_out} more estimators are not drawn`);
  return make('div', {}, svg, make('p', { class: 'quiet' }, `${notes.join('; ')}.`));
}

export const level = (of) => `${+(100 * of.level).toPrecision(6)} %`;

/**
 * Draw rows with intervals; one that would blow up the axis is cut and ends in an arrow.
 *
 * A row is {name, value, low, high, verdict, cells}; `choose` is called with the row that is pressed.
 */
export function intervals(rows, { heads = [], truth = null, best = '', cell = 62, choose = null }) {
  const [width, line, top] = [560, 26, 22];
  const height = line * rows.length + 58;
  const bottom = height - 28;
  const left = 8 + 7 * Math.max(...rows.map((row) => Math.min(row.name.length, 24)), 4);
  const right = width - cell * heads.length - 12;
  const extent = limits(rows, truth);
  const toX = scale(extent, [left + 8, right - 8]);
  const svg = draw('svg', { viewBox: `0 0 ${width} ${height}`, width: '100%', class: 'forest' });
  const marks = ticks(...extent, 4);
  for (const tick of marks.length > 1 ? marks : ticks(...extent, 8)) {
    const x = toX(tick);
    draw('line', { class: 'grid', x1: x, x2: x, y1: top, y2: bottom }, svg);
    draw('text', { x, y: height - 12, 'text-anchor': 'middle' }, svg, brief(tick));
  }
  const cells = (texts, y, attributes, parent) => texts.forEach((text, k) => draw('text', {
    ...attributes, x: right + cell * (k + 1), y, 'text-anchor': 'end',
  }, parent, text));
  cells(heads, 14, { class: 'title' }, svg);
  if (truth) {
    const [at, reach] = [toX(truth[0]), toX(truth[0] + 2 * (truth[1] ?? 0)) - toX(truth[0])];
    draw('rect', { class: 'truth', x: at - reach, width: 2 * reach, y: top, height: bottom - top }, svg);
    draw('line', { class: 'truth', x1: at, x2: at, y1: top, y2: bottom }, svg);
  }
  rows.forEach((row, k) => {
    const y = top + line * (k + 0.5);
    const group = draw('g', { class: `row ${row.verdict}`, 'data-estimator': row.name }, svg);
    draw('rect', { class: 'hit', x: 0, y: y - line / 2, width, height: line }, group);
    draw('title', {}, group, `${row.name}: ${brief(row.value, 4)} (${brief(row.low, 4)} to ${brief(row.high, 4)}), ${row.verdict}`);
    draw('text', { class: row.name === best ? 'best' : '', x: 4, y: y + 4 }, group, shorten(row.name, 24));
    cells(row.cells, y + 4, {}, group);
    if (defined(row.value)) interval(group, row, y, toX, [left + 2, right - 2], row.name === best ? 6 : 5);
    else draw('text', { class: 'title', x: left + 10, y: y + 4 }, group, 'undefined');
    if (choose) pressable(group, () => choose(row));
  });
  return svg;
}

/** Draw a value and its interval between the edges a and b. */
function interval(group, row, y, toX, [a, b], size) {
  const at = (end, none) => (defined(end) ? Math.max(a, Math.min(b, toX(end))) : none);
  const [low, high] = [at(row.low, a), at(row.high, b)];
  draw('line', { class: 'interval', x1: low, x2: high, y1: y, y2: y }, group);
  if (low === a) draw('path', { class: 'arrow', d: `M${a} ${y}l6 -4v8Z` }, group);
  if (high === b) draw('path', { class: 'arrow', d: `M${b} ${y}l-6 -4v8Z` }, group);
  const x = toX(row.value);
  if (x >= a && x <= b) marker(group, row.verdict, x, y, size);
}

/** Tell verdicts apart by shape as well: a circle, a diamond, a cross. */
function marker(group, verdict, x, y, r) {
  if (verdict === 'amber') {
    draw('path', { class: 'mark', d: `M${x} ${y - r - 1}l${r} ${r + 1}l-${r} ${r + 1}l-${r} -${r + 1}Z` }, group);
  } else if (verdict === 'red') {
    draw('path', { class: 'mark cross', d: `M${x - r + 1} ${y - r + 1}l${2 * r - 2} ${2 * r - 2}m0 -${2 * r - 2}l-${2 * r - 2} ${2 * r - 2}` }, group);
  } else {
    draw('circle', { class: 'mark', cx: x, cy: y, r }, group);
  }
}

/** Return the limits of the axis: values and ends within three times the usual reach. */
function limits(rows, truth) {
  const known = rows.filter((row) => defined(row.value));
  const certain = truth ? [truth[0]] : [];
  const values = [...known.map((row) => row.value), ...certain].sort((a, b) => a - b);
  if (!values.length) return [0, 1];
  const middle = values[Math.floor(values.length / 2)];
  const away = (x) => Math.abs(x - middle);
  const reaches = known.filter((row) => defined(row.low) && defined(row.high))
    .map((row) => Math.max(...[row.value, row.low, row.high].map(away))).sort((a, b) => a - b);
  const usual = reaches[Math.ceil((reaches.length - 1) / 3)] ?? 0.1 * Math.abs(middle);
  const near = known.flatMap((row) => [row.value, row.low, row.high])
    .filter((x) => defined(x) && away(x) <= 3 * usual);
  const [low, high] = [Math.min(...near, middle, ...certain), Math.max(...near, middle, ...certain)];
  return low === high ? [low - 1, high + 1] : [low, high];
}

// Words -------------------------------------------------------------------------------

/** Say why, the recommended estimate first, and once for estimators that share it. */
function reasons(e) {
  const groups = new Map();
  for (const row of e.estimates) {
    const key = JSON.stringify([row.verdict, row.reasons, row.advice]);
    if (!groups.has(key)) groups.set(key, { ...row, names: [] });
    groups.get(key).names.push(row.name);
  }
  const items = [...groups.values()].map((group) => make('li', {},
    make('div', { class: 'who' }, badge(group.verdict), make('b', {}, group.names.join(', '))),
    ...group.reasons.map((reason) => make('div', {}, sentence(reason))),
    ...group.advice.map((advice) => make('div', { class: 'advice' }, `→ ${sentence(advice)}`)),
    ...group.notes.map((note) => make('div', { class: 'quiet' }, `Note: ${note}.`)),
  ));
  const list = (from, to) => make('ul', { class: 'reasons' }, ...items.slice(from, to));
  const bases = [...new Set(e.estimates.map((row) => row.basis).filter(Boolean))];
  return make('div', {}, list(0, 3),
    items.length > 3 ? make('details', {}, make('summary', {}, `${items.length - 3} more`), list(3)) : null,
    ...bases.slice(0, 3).map((basis) => make('p', { class: 'quiet' }, sentence(basis))));
}

export const sentence = (text) => `${text.charAt(0).toUpperCase()}${text.slice(1)}.`;

// Weights -----------------------------------------------------------------------------

function essChart({ x, curves, episodes, bounds }) {
  const floor = 0.7;  // no weight left: drawn on the lower edge
  const top = Math.max(1.4 * episodes, 1.5 * bounds[1]);
  const zones = [['red', floor, bounds[0]], ['amber', bounds[0], bounds[1]], ['green', bounds[1], top]];
  return curveChart(x, curves, {
    x: [x[0], Math.max(x.at(-1), x[0] + 1)], y: [floor, top], yLog: true,
    xTitle: 'step of the episode', label: 'Effective sample size over the steps',
  }, (value) => Math.max(value ?? floor, floor), ({ svg, area, toY }) => {
    for (const [colour, low, high] of zones) {
      draw('rect', {
        class: `zone ${colour}`, x: area.left, width: area.right - area.left,
        y: toY(high), height: toY(low) - toY(high),
      }, svg);
    }
    const all = toY(episodes);
    draw('line', { class: 'dotted', x1: area.left, x2: area.right, y1: all, y2: all }, svg);
    draw('text', { class: 'title', x: area.right - 4, y: all - 4, 'text-anchor': 'end' }, svg,
      `${episodes.toLocaleString('en')} episodes`);
  });
}

function concentrationChart({ x, curves }) {
  return curveChart(x, curves, {
    x: [Math.min(x[0], 0.5), 1], xLog: true, y: [0, 1], yTicks: [0, 0.25, 0.5, 0.75, 1],
    xFormat: percent, yFormat: percent, xTitle: 'heaviest episodes, of all',
    label: 'Share of the weight in the heaviest episodes',
  }, (value) => value ?? 0, ({ svg, toX, toY }) => {
    const equal = x.map((share) => ({ x: toX(share), y: toY(share) }));
    draw('path', { class: 'dotted', fill: 'none', d: path(equal) }, svg);
  });
}

/** Draw curves over x with their key; `under` draws what lies below them. */
function curveChart(x, curves, axes, valueOf, under) {
  const chart = frame({
    width: 480, height: 250, margin: { left: 46, right: 14, top: 14, bottom: 36 }, ...axes,
  });
  under(chart);
  const plot = draw('g', { 'clip-path': chart.clip }, chart.svg);
  const key = make('div', { class: 'key' });
  curves.forEach(({ names, y }, k) => {
    const colour = `var(--s${k % TONES})`;
    const points = y.map((value, i) => ({ x: chart.toX(x[i]), y: chart.toY(valueOf(value)) }));
    if (points.length === 1) draw('circle', { cx: points[0].x, cy: points[0].y, r: 4, fill: colour }, plot);
    draw('path', {
      class: 'curve', d: path(points), fill: 'none', stroke: colour, 'stroke-width': Math.max(2.6 - 0.4 * k, 1.4),
    }, plot);
    const some = names.length > 5 ? [...names.slice(0, 4), `${names.length - 4} more`] : names;
    key.append(make('span', { title: names.join(', ') }, swatch(colour), some.join(', ')));
  });
  return make('div', {}, chart.svg, key);
}

export function swatch(colour) {
  const element = make('i', { class: 'swatch' });
  element.style.background = colour;
  return element;
}

function behaviours({ names, episodes, weight, left_out: hidden }) {
  const rows = names.map((name, k) => ({ name, share: weight[k], mark: episodes[k] }));
  const more = hidden ? make('p', { class: 'quiet' }, `${hidden} more policies hold less of it.`) : null;
  return make('div', {}, bars(rows), more);
}

function overlap({ rows, columns, matrix }) {
  const strip = (name) => name.replace(/^policy /, '');
  const left = 12 + 6.6 * Math.max(...rows.map((name) => strip(name).length));
  const side = Math.min(34, (480 - left) / columns.length);
  const height = side * rows.length + 36;
  const svg = draw('svg', { viewBox: `0 0 480 ${height}`, width: '100%', class: 'overlap' });
  matrix.forEach((row, i) => {
    const y = side * i + (i === rows.length - 1 ? 6 : 0);
    draw('text', { x: left - 6, y: y + side / 2 + 4, 'text-anchor': 'end' }, svg, strip(rows[i]));
    row.forEach((value, j) => {
      const x = left + side * j;
      const cell = draw('rect', {
        class: defined(value) ? 'cell' : 'cell unknown', x: x + 0.5, y: y + 0.5,
        width: side - 1, height: side - 1, rx: 2, 'fill-opacity': defined(value) ? 0.06 + 0.94 * value : 1,
      }, svg);
      draw('title', {}, cell, `${rows[i]} with ${columns[j]}: ${defined(value) ? brief(value) : 'unknown'}`);
      if (side >= 24 && defined(value)) {
        const text = value >= 0.995 ? '1' : value < 0.005 ? '0' : value.toFixed(2).slice(1);
        draw('text', {
          class: value > 0.5 ? 'inside' : '', x: x + side / 2, y: y + side / 2 + 4, 'text-anchor': 'middle',
        }, svg, text);
      }
    });
  });
  const every = side < 20 ? Math.ceil(24 / side) : 1;
  columns.forEach((name, j) => {
    if (j % every) return;
    draw('text', { x: left + side * (j + 0.5), y: height - 12, 'text-anchor': 'middle' }, svg, strip(name));
  });
  return svg;
}

// Ranking -----------------------------------------------------------------------------

function rankingCard(ranking) {
  const rows = ranking.policies.map((row) => ({ ...row, cells: [chance(row.chance)] }));
  const notes = [`by ${ranking.by}`];
  if (defined(ranking.step)) notes.push(`at step ${ranking.step.toLocaleString('en')}`);
  if (ranking.left_out) notes.push(`${ranking.left_out} lower policies are not drawn`);
  if (ranking.cautious !== rows[0].name) notes.push(`cautious choice: ${ranking.cautious}`);
  return card('ranking', 'Which checkpoint is best', `${notes.join('; ')}.`,
    intervals(rows, { heads: ['P(best)'], best: rows[0].name }));
}

const chance = (p) => (!defined(p) ? 'unknown' : p < 0.001 ? '<0.1 %' : p > 0.999 ? '>99.9 %' : percent(p));
