// What is known of one policy of a training loop, from the steps that the loop takes anyway.

import { badge, card, intervals, sentence } from './evaluation.js';
import { brief, draw, make, percent, scale } from './svg.js';

const NAMES = { provisional: 'provisional', settled: 'settled', fresh: 'fresh episodes' };
const WAYS = {
  advantages: 'steps of the training', simulation: 'a learned environment', fresh: 'fresh episodes',
};
const MEANINGS = {
  provisional: 'it may still change: steps of the next policies settle it within a few rollouts',
  settled: 'steps of later policies have come in, and this value is final',
  fresh: 'the policy played these episodes itself',
};

/** Return the kinds of values that there are, the one that counts first. */
const kinds = (free) => ['settled', 'provisional', 'fresh'].filter((kind) => free[kind]);

/** Return headline, verdict and data of the value that counts. */
export function lead(free) {
  const kind = kinds(free)[0];
  const { headline, verdict, episodes, shares } = free[kind];
  const fresh = shares.fresh ? ` and fresh ones, which have ${percent(shares.fresh)} of the weight` : '';
  const data = kind === 'fresh' ? `${episodes} fresh episodes` : `${kind}, from ${episodes} episodes of the training${fresh}`;
  return { headline, verdict, data };
}

/** Return the cards; `choose` is called with the step of a policy that was clicked. */
export function freeCards(free, record, choose) {
  const first = free[kinds(free)[0]];
  const played = first === free.fresh;  // nothing else counts
  return [
    card('free', 'What this policy is worth', '', values(free, first)),
    card('trust', 'How far to trust it', '', trust(free, record)),
    !played && Object.keys(first.shares).length > 0 && card('ways', 'What the value rests on',
      'the share of each method: the more certain it is, the more it counts', ways(first.shares)),
    record?.best.length > 0 && card('best', 'The best policies so far', bestNote(record),
      best(record.best, choose, played)),
  ].filter(Boolean);
}

function values(free, first) {
  const level = `${+(100 * first.level).toPrecision(6)} %`;
  if (first === free.fresh) {
    return make('div', {}, intervals([{ ...first, name: NAMES.fresh, cells: [] }], { heads: [], truth: null, best: '' }),
      make('p', { class: 'quiet' }, `${level} interval of the mean.`));
  }
  const rows = kinds(free).map((kind) => ({
    ...free[kind], name: NAMES[kind], cells: [free[kind].fresh_episodes === null ? '' : brief(free[kind].fresh_episodes, 2)],
  }));
  return make('div', {}, intervals(rows, { heads: ['fresh episodes'], truth: null, best: rows[0].name, cell: 88 }),
    make('p', { class: 'quiet' }, `${level} intervals; the column says about how many fresh episodes would be as accurate.`));
}

function trust(free, record) {
  const items = kinds(free).map((kind) => make('li', {},
    make('div', { class: 'who' }, badge(free[kind].verdict), make('b', {}, NAMES[kind])),
    make('div', {}, sentence(MEANINGS[kind])), ...advice(kind, free[kind], free)));
  const said = [];
  if (record?.settled) {
    said.push(record.settled === 1
      ? `One value has settled so far; it lay ${record.within ? 'within' : 'outside'} its provisional band.`
      : `${record.settled} values have settled so far; ${record.within} of them lay within their provisional band.`);
  }
  if (!free.fresh) said.push('The learner trains on the same steps (in-sample).');
  return make('div', {}, make('ul', { class: 'reasons' }, ...items),
    ...said.map((line) => make('p', { class: 'quiet' }, line)));
}

function advice(kind, { verdict }, free) {
  if (verdict === 'green' || kind === 'settled') return [];
  const play = free.fresh ? 'play more fresh episodes' : 'play fresh episodes (eval_env)';
  const words = kind === 'fresh' ? 'play 10 of them or more'
    : `it settles if the training goes on for a few rollouts; or ${play}`;
  return [make('div', { class: 'advice' }, `→ ${sentence(words)}`)];
}

function ways(shares) {
  const rows = Object.entries(shares).sort((a, b) => b[1] - a[1]);
  const [line, width, left] = [26, 480, 170];
  const toX = scale([0, 1], [left, width - 50]);
  const svg = draw('svg', { viewBox: `0 0 ${width} ${line * rows.length + 6}`, width: '100%' });
  rows.forEach(([name, share], k) => {
    const y = line * k;
    draw('text', { x: left - 10, y: y + 18, 'text-anchor': 'end' }, svg, WAYS[name] ?? name);
    draw('rect', {
      class: 'bar', x: left, y: y + 5, height: line - 9, width: Math.max(toX(share) - left, 0.5), rx: 2,
    }, svg);
    draw('text', { x: toX(share) + 6, y: y + 18 }, svg, percent(share));
  });
  return svg;
}

const bestNote = ({ policies }) => `by the lower end of the interval, out of ${policies}; click one to look at it`;

function best(rows, choose, played) {
  const word = (row) => (row.settled ? 'settled' : played ? 'fresh' : 'provisional');
  const svg = intervals(rows.map((row) => ({
    ...row, name: `step ${row.step.toLocaleString('en')}`, verdict: row.settled || played ? 'settled' : 'provisional',
    cells: [word(row)],
  })), { heads: [''], truth: null, best: '', cell: 84 });
  svg.querySelectorAll('.row').forEach((row, k) => row.addEventListener('click', () => choose(rows[k].step)));
  return svg;
}
