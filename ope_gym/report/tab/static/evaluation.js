// What is known of one evaluation: forest, reasons, effective sample size, weights, ranking.

import { brief, draw, frame, make, path, percent, scale, shorten, ticks } from './svg.js';

const WORDS = {
  green: 'nothing visible speaks against it', amber: 'use with care', red: 'do not use this number',
};
const PALETTE = ['var(--s0)', 'var(--s1)', 'var(--s2)', 'var(--s3)', 'var(--s4)', 'var(--s5)'];

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
      `${free ? second(free) : ''}${e.regime ? `Data: ${e.regime}. ${e.explained}` : ''}`, forest(e)),
    card('reasons', free ? 'How far to trust the importance weights' : 'How far to trust it', '', reasons(e)),
    e.ess && card('ess', 'How many episodes the weights leave',
      'effective sample size over the steps of an episode', essChart(e.ess), key(e.ess.curves)),
    e.concentration && card('concentration', 'How few episodes hold the weight',
      'share of the total weight in the heaviest episodes; dotted: if all had the same weight',
      concentrationChart(e.concentration), key(e.concentration.curves)),
    e.behaviours && card('behaviours', 'Whose episodes they are',
      `their share of the weights of ${e.recommended} (bar) and of the episodes (tick)`,
      behaviours(e.behaviours)),
    e.overlap && card('overlap', 'Overlap of policies',
      '1: both make the same episodes equally likely, 0: nothing in common', overlap(e.overlap)),
    ranking && rankingCard(ranking),
  ].filter(Boolean);
}

/** Say why the evaluation is not the value above. */
const second = (free) => `Whole episodes of several policies, each counted by how likely this one makes it${
  free.provisional || free.settled ? '; usually far less sure than the value above, which learns from every step' : ''}. `;

export function card(id, title, note, ...content) {
  return make('section', { class: 'card', id: `card-${id}` }, make('h3', {}, title),
    note ? make('p', { class: 'quiet' }, note) : null, ...content.filter(Boolean));
}

export function badge(colour) {
  return make('span', { class: `badge ${colour}`, title: WORDS[colour] }, colour);
}

// Forest ------------------------------------------------------------------------------

function forest(e) {
  const rows = e.estimates.map((row) => ({
    ...row, cells: [row.ess === null ? '' : brief(row.ess, 2), row.fresh_episodes === null ? '' : brief(row.fresh_episodes, 2)],
  }));
  const level = `${+(100 * e.level).toPrecision(6)} %`;
  const svg = intervals(rows, {
    heads: ['ESS', 'fresh episodes'], truth: e.truth, best: e.recommended, cell: 98,
  });
  const told = [`${level} intervals (${e.method}); the last column says about how many fresh episodes would be as accurate`];
  if (e.truth) told.push('dashed line: the value from fresh rollouts');
  if (e.left_out) told.push(`${e.left_out} more estimators are not drawn`);
  return make('div', {}, svg, make('p', { class: 'quiet' }, `${told.join('; ')}.`));
}

/** Draw rows with intervals; one that would blow up the axis is cut and ends in an arrow. */
export function intervals(rows, { heads, truth, best, cell = 62 }) {
  const width = 560;
  const line = 26;
  const left = 8 + 7 * Math.max(...rows.map((row) => Math.min(row.name.length, 24)), 4);
  const right = width - cell * heads.length - 12;
  const height = line * rows.length + 58;
  const extent = limits(rows, truth);
  const toX = scale(extent, [left + 8, right - 8]);
  const svg = draw('svg', { viewBox: `0 0 ${width} ${height}`, width: '100%', class: 'forest' });
  const marks = ticks(...extent, 4);
  for (const tick of marks.length > 1 ? marks : ticks(...extent, 8)) {
    const x = toX(tick);
    draw('line', { class: 'grid', x1: x, x2: x, y1: 22, y2: height - 28 }, svg);
    draw('text', { x, y: height - 12, 'text-anchor': 'middle' }, svg, brief(tick));
  }
  heads.forEach((head, k) => draw('text', {
    class: 'title', x: right + cell * (k + 1), y: 14, 'text-anchor': 'end',
  }, svg, head));
  if (truth) {
    const [value, error] = truth;
    if (error) {
      const [a, b] = [toX(value - 2 * error), toX(value + 2 * error)];
      draw('rect', { class: 'truth', x: a, width: b - a, y: 22, height: height - 50 }, svg);
    }
    draw('line', { class: 'truth', x1: toX(value), x2: toX(value), y1: 22, y2: height - 28 }, svg);
  }
  rows.forEach((row, k) => {
    const y = 22 + line * (k + 0.5);
    const group = draw('g', { class: `row ${row.verdict}`, 'data-estimator': row.name }, svg);
    draw('rect', { class: 'hit', x: 0, y: y - line / 2, width, height: line }, group);
    draw('title', {}, group, `${row.name}: ${brief(row.value, 4)} (${brief(row.low, 4)} to ${brief(row.high, 4)}), ${row.verdict}`);
    draw('text', { class: row.name === best ? 'best' : '', x: 4, y: y + 4 }, group, shorten(row.name, 24));
    row.cells.forEach((said, j) => draw('text', {
      x: right + cell * (j + 1), y: y + 4, 'text-anchor': 'end',
    }, group, said));
    if (row.value === null) {
      draw('text', { class: 'title', x: left + 10, y: y + 4 }, group, 'undefined');
      return;
    }
    const [a, b] = [left + 2, right - 2];
    const at = (v, none) => (v === null ? none : Math.max(a, Math.min(b, toX(v))));
    const [low, high] = [at(row.low, a), at(row.high, b)];
    draw('line', { class: 'interval', x1: low, x2: high, y1: y, y2: y }, group);
    if (low === a) draw('path', { class: 'arrow', d: `M${a} ${y}l6 -4v8Z` }, group);
    if (high === b) draw('path', { class: 'arrow', d: `M${b} ${y}l-6 -4v8Z` }, group);
    const x = toX(row.value);
    if (x >= a && x <= b) marker(group, row.verdict, x, y, row.name === best ? 6 : 5);
  });
  return svg;
}

/** Tell verdicts apart by shape as well: a circle, a diamond, a cross. */
function marker(group, verdict, x, y, r) {
  if (verdict === 'amber') {
    draw('path', { class: 'mark', d: `M${x} ${y - r - 1}l${r} ${r + 1}l-${r} ${r + 1}l-${r} -${r + 1}Z` }, group);
  } else if (verdict !== 'red') {
    draw('circle', { class: 'mark', cx: x, cy: y, r }, group);
  } else {
    draw('path', { class: 'mark cross', d: `M${x - r + 1} ${y - r + 1}l${2 * r - 2} ${2 * r - 2}m0 -${2 * r - 2}l-${2 * r - 2} ${2 * r - 2}` }, group);
  }
}

/** Return the limits of the axis: all values, and intervals up to three times the usual reach. */
function limits(rows, truth) {
  const known = rows.filter((row) => row.value !== null);
  const values = known.map((row) => row.value);
  if (truth) values.push(truth[0]);
  if (!values.length) return [0, 1];
  values.sort((a, b) => a - b);
  const middle = values[Math.floor(values.length / 2)];
  const reaches = known.filter((row) => row.low !== null && row.high !== null)
    .map((row) => Math.max(row.high - middle, middle - row.low)).sort((a, b) => a - b);
  const most = 3 * (reaches[Math.floor(reaches.length / 2)] ?? Math.abs(middle) ?? 1) || 1;
  const near = (x) => Math.max(middle - most, Math.min(middle + most, x));
  const all = known.flatMap((row) => [row.low ?? row.value, row.high ?? row.value, row.value]);
  if (truth) all.push(truth[0]);
  const low = Math.min(...all.map(near));
  const high = Math.max(...all.map(near));
  return low === high ? [low - 1, high + 1] : [low, high];
}

// Words -------------------------------------------------------------------------------

/** Say why, the recommended estimate first, and once for estimators that share it. */
function reasons(e) {
  const groups = new Map();
  for (const row of e.estimates) {
    const said = JSON.stringify([row.verdict, row.reasons, row.advice]);
    if (!groups.has(said)) groups.set(said, { ...row, names: [] });
    groups.get(said).names.push(row.name);
  }
  const items = [...groups.values()].map((group) => make('li', {},
    make('div', { class: 'who' }, badge(group.verdict), make('b', {}, group.names.join(', '))),
    ...group.reasons.map((reason) => make('div', {}, sentence(reason))),
    ...group.advice.map((advice) => make('div', { class: 'advice' }, `→ ${sentence(advice)}`)),
    ...group.notes.map((note) => make('div', { class: 'quiet' }, `Note: ${note}.`)),
  ));
  const first = items.slice(0, 3);
  const rest = items.slice(3);
  const bases = [...new Set(e.estimates.map((row) => row.basis).filter(Boolean))];
  const parts = [make('ul', { class: 'reasons' }, ...first)];
  if (rest.length) {
    parts.push(make('details', {}, make('summary', {}, `${rest.length} more`),
      make('ul', { class: 'reasons' }, ...rest)));
  }
  parts.push(...bases.slice(0, 3).map((basis) => make('p', { class: 'quiet' }, sentence(basis))));
  return make('div', {}, ...parts);
}

export const sentence = (text) => `${text.charAt(0).toUpperCase()}${text.slice(1)}.`;

// Weights -----------------------------------------------------------------------------

const SMALL = { width: 480, height: 250, margin: { left: 46, right: 14, top: 14, bottom: 36 } };

function essChart({ x, curves, episodes, bounds }) {
  const floor = 0.7;
  const top = Math.max(1.4 * episodes, 1.5 * bounds[1]);
  const { svg, toX, toY, area, clip } = frame({
    ...SMALL, x: [x[0], Math.max(x[x.length - 1], x[0] + 1)], y: [floor, top], yLog: true,
    xTitle: 'step of the episode', label: 'Effective sample size over the steps',
  });
  const zones = [['red', floor, bounds[0]], ['amber', bounds[0], bounds[1]], ['green', bounds[1], top]];
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
  const plot = draw('g', { 'clip-path': clip }, svg);
  curveLines(plot, curves, (k) => toX(x[k]), (v) => toY(Math.max(v ?? floor, floor)));
  return svg;
}

function concentrationChart({ x, curves }) {
  const low = Math.min(x[0], 0.5);
  const { svg, toX, toY, clip } = frame({
    ...SMALL, x: [low, 1], xLog: true, y: [0, 1], yTicks: [0, 0.25, 0.5, 0.75, 1],
    xFormat: percent, yFormat: percent, xTitle: 'heaviest episodes, of all',
    label: 'Share of the weight in the heaviest episodes',
  });
  const plot = draw('g', { 'clip-path': clip }, svg);
  draw('path', { class: 'dotted', fill: 'none', d: path(x.map((s) => ({ x: toX(s), y: toY(s) }))) }, plot);
  curveLines(plot, curves, (k) => toX(x[k]), (v) => toY(v ?? 0));
  return svg;
}

function curveLines(plot, curves, toX, toY) {
  curves.forEach((curve, k) => {
    const points = curve.y.map((v, i) => ({ x: toX(i), y: toY(v) }));
    if (points.length === 1) {
      draw('circle', { cx: points[0].x, cy: points[0].y, r: 4, fill: PALETTE[k % 6] }, plot);
    }
    draw('path', {
      class: 'curve', d: path(points), fill: 'none', stroke: PALETTE[k % 6],
      'stroke-width': Math.max(2.6 - 0.4 * k, 1.4),
    }, plot);
  });
}

function key(curves) {
  return make('div', { class: 'key' }, ...curves.map((curve, k) => {
    const swatch = make('i', { class: 'swatch' });
    swatch.style.background = PALETTE[k % 6];
    const names = curve.names.length > 5 ? [...curve.names.slice(0, 4), `${curve.names.length - 4} more`] : curve.names;
    return make('span', { title: curve.names.join(', ') }, swatch, names.join(', '));
  }));
}

function behaviours({ names, episodes, weight, left_out: hidden }) {
  const line = 20;
  const width = 480;
  const left = 12 + 6.6 * Math.max(...names.map((name) => name.length));
  const top = Math.max(...weight, ...episodes, 0.01);
  const toX = scale([0, top], [left, width - 50]);
  const height = line * names.length + 8;
  const svg = draw('svg', { viewBox: `0 0 ${width} ${height}`, width: '100%' });
  names.forEach((name, k) => {
    const y = line * k + 4;
    draw('text', { x: left - 8, y: y + 13, 'text-anchor': 'end' }, svg, name);
    draw('rect', {
      class: 'bar', x: left, y: y + 3, height: line - 7, width: Math.max(toX(weight[k]) - left, 0.5), rx: 2,
    }, svg);
    const at = toX(episodes[k]);
    draw('line', { class: 'share', x1: at, x2: at, y1: y + 1, y2: y + line - 2 }, svg);
    draw('text', { x: Math.max(toX(weight[k]), at) + 6, y: y + 13 }, svg, percent(weight[k]));
  });
  const more = hidden ? make('p', { class: 'quiet' }, `${hidden} more policies hold less of it.`) : null;
  return more ? make('div', {}, svg, more) : svg;
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
        class: value === null ? 'cell unknown' : 'cell', x: x + 0.5, y: y + 0.5,
        width: side - 1, height: side - 1, rx: 2,
        'fill-opacity': value === null ? 1 : 0.06 + 0.94 * value,
      }, svg);
      draw('title', {}, cell, `${rows[i]} with ${columns[j]}: ${value === null ? 'unknown' : brief(value)}`);
      if (side >= 24 && value !== null) {
        const said = value >= 0.995 ? '1' : value < 0.005 ? '0' : value.toFixed(2).slice(1);
        draw('text', {
          class: value > 0.5 ? 'inside' : '', x: x + side / 2, y: y + side / 2 + 4, 'text-anchor': 'middle',
        }, svg, said);
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
  const rows = ranking.policies.map((row) => ({
    ...row, cells: [row.chance === null ? 'unknown' : chance(row.chance)],
  }));
  const told = [`by ${ranking.by}, at step ${ranking.step.toLocaleString('en')}`];
  if (ranking.left_out) told.push(`${ranking.left_out} lower policies are not drawn`);
  if (ranking.cautious !== rows[0].name) told.push(`cautious choice: ${ranking.cautious}`);
  return card('ranking', 'Which checkpoint is best', `${told.join('; ')}.`,
    intervals(rows, { heads: ['P(best)'], truth: null, best: rows[0].name }));
}

const chance = (p) => (p < 0.001 ? '<0.1 %' : p > 0.999 ? '>99.9 %' : percent(p));
