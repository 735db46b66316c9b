// What is known of one policy of a training loop, from the steps that the loop takes anyway.

import { badge, card, intervals, level, sentence } from './evaluation.js';
import { bars, brief, defined, make, percent } from './svg.js';

const KINDS = ['settled', 'provisional', 'fresh'];  // the one that counts first
const WAYS = new Map([
  ['seen', 'steps of the training'], ['simulation', 'a learned environment'], ['fresh', 'fresh episodes'],
]);
const MEANINGS = {
  provisional: 'it may still change: steps of the next policies settle it within a few rollouts',
  settled: 'steps of later policies have come in, and this value is final',
  fresh: 'the policy played these episodes itself',
};

const kinds = (free) => KINDS.filter((kind) => free[kind]);
const titled = (kind) => (kind === 'fresh' ? 'fresh episodes' : kind);

/** Return headline, verdict and data of the value that counts. */
export function lead(free) {
  const kind = kinds(free)[0];
  const { headline, verdict, episodes, shares } = free[kind];
  const fresh = shares.fresh ? ` and fresh ones, which have ${percent(shares.fresh)} of the weight` : '';
  const data = kind === 'fresh' ? `${episodes} fresh episodes` : `${kind}, from ${episodes} episodes of the training${fresh}`;
  return { headline, verdict, data };
}

/** Return the cards; `choose` is called with the step of a policy that was pressed. */
export function freeCards(free, record, choose) {
  const first = free[kinds(free)[0]];
  const played = first === free.fresh;  // nothing else counts
  const ways = Object.entries(first.shares).sort((a, b) => b[1] - a[1])
    .map(([name, share]) => ({ name: WAYS.get(name) ?? name, share }));
  return [
    card('free', 'What this policy is worth', '', values(free, first, played)),
    card('trust', 'How far to trust it', '', trust(free, record)),
    !played && ways.length > 0 && card('ways', 'What the value rests on',
      'the share of each method: the more certain it is, the more it counts', bars(ways, 1)),
    record?.best.length > 0 && card('best', 'The best policies so far',
      `by the lower end of the interval, out of ${record.policies}; click one to look at it`,
      best(record.best, choose, played)),
  ].filter(Boolean);
}

function values(free, first, played) {
  const rows = kinds(free).filter((kind) => !played || kind === 'fresh').map((kind) => ({
    ...free[kind], name: titled(kind),
    cells: played ? [] : [defined(free[kind].fresh_episodes) ? brief(free[kind].fresh_episodes, 2) : ''],
  }));
  const note = played ? 'interval of the mean'
    : 'intervals; the column says about how many fresh episodes would be as accurate';
  return make('div', {},
    intervals(rows, { heads: played ? [] : ['fresh episodes'], best: rows[0].name, cell: 88 }),
    make('p', { class: 'quiet' }, `${level(first)} ${note}.`));
}

function trust(free, record) {
  const items = kinds(free).map((kind) => make('li', {},
    make('div', { class: 'who' }, badge(free[kind].verdict), make('b', {}, titled(kind))),
    make('div', {}, sentence(MEANINGS[kind])), advice(kind, free)));
  const notes = [];
  if (record?.settled === 1) {
    notes.push(`One value has settled so far; it lay ${record.within ? 'within' : 'outside'} its provisional band.`);
  } else if (record?.settled) {
    notes.push(`${record.settled} values have settled so far; ${record.within} of them lay within their provisional band.`);
  }
  if (!free.fresh) notes.push('The learner trains on the same steps (in-sample).');
  return make('div', {}, make('ul', { class: 'reasons' }, ...items),
    ...notes.map((note) => make('p', { class: 'quiet' }, note)));
}

function advice(kind, free) {
  if (free[kind].verdict === 'green' || kind === 'settled') return null;
  const play = free.fresh ? 'play more fresh episodes' : 'play fresh episodes (eval_env)';
  const words = kind === 'fresh' ? 'play 10 of them or more'
    : `it settles if the training goes on for a few rollouts; or ${play}`;
  return make('div', { class: 'advice' }, `→ ${sentence(words)}`);
}

function best(rows, choose, played) {
  const kind = (row) => (row.settled ? 'settled' : played ? 'fresh' : 'provisional');
  return intervals(rows.map((row) => ({
    ...row, name: `step ${row.step.toLocaleString('en')}`, cells: [kind(row)],
    verdict: kind(row) === 'provisional' ? 'provisional' : 'settled',
  })), { heads: [''], cell: 84, choose: (row) => choose(row.step) });
}
