// The OPE tab: what the current policy is worth, over training and in detail.

import { arrange, badge, card, cards, swatch } from './evaluation.js';
import { freeCards, lead } from './free.js';
import { labels } from './labels.js';
import { brief, defined, make, pressable, shorten } from './svg.js';
import { theme } from './theme.js';
import { light, trainingChart } from './training.js';

const POLL = 5000;  // milliseconds between looks while something changes
const REST = 30000;  // and where nothing did for a while
const QUIET = 12;  // looks without a change after which it rests
const COLOURS = 8;  // runs that can be told apart; of more, those in focus or chosen have a colour
const BANDED = 6;  // coloured runs with a band each; of more only the one in focus has one
const LISTED = 200;  // runs in the list at most
const SERIES = 40;  // series in the list at most, but for those that were ticked
const DASHES = ['', '8 4', '3 4', '8 3 2 3'];  // of estimators that share a colour
const LABELS = new Map([
  ['settled', 'settled estimate'], ['provisional', 'provisional estimate'], ['fresh', 'fresh evaluations'],
  ['rollout/return', 'return of rollouts'], ['rollout/ep_rew_mean', 'return of rollouts'],
  ['eval/mean_reward', 'return of evaluation episodes'],
]);
const SPECIAL = new Map([['settled', 'var(--s0)'], ['provisional', 'var(--s5)'], ['fresh', 'var(--fresh)']]);
const RETURNS = new Map([
  ['rollout/return', 'var(--return)'], ['rollout/ep_rew_mean', 'var(--return)'], ['eval/mean_reward', 'var(--eval)'],
]);
const VERDICTS = ['red', 'amber', 'green'];

const state = {
  runs: [],  // as the server lists them, the latest first
  hidden: new Set(),  // runs that were unticked
  ticked: null,  // names of series and returns; null: the usual ones
  chosen: new Set(),  // runs that were given a colour where there are too many
  slots: new Map(),  // place in the palette by run
  tones: new Map(),  // and by estimator
  run: null,  // in focus
  step: null,  // chosen; null: the last one
  data: {},  // points by run; names are anybody's, so look them up by `of`
  details: null,  // of the run and step in focus
  filter: '',
  part: null,  // letters in the names of more series; null: these are not listed
  more: { names: [], count: 0 },  // series that have them
};
const page = {};

/** Return a field that an answer itself has: `toString` is none. */
const of = (answer, name) => (Object.hasOwn(answer ?? {}, name) ? answer[name] : undefined);
const label = (name) => LABELS.get(name) ?? name;

export async function render() {
  document.head.append(make('link', { rel: 'stylesheet', href: './style.css' }));
  theme();
  page.headline = make('header', { id: 'headline' });
  page.runs = make('div', { id: 'runs' });
  page.matches = make('div');
  const search = make('input', { type: 'search', placeholder: 'filter series' });
  page.more = make('details', { id: 'more' }, make('summary'), search, page.matches);
  const find = () => {
    state.part = page.more.open ? search.value : null;
    if (page.more.open) fetchMore();
  };
  search.addEventListener('input', find);
  page.more.addEventListener('toggle', find);
  page.series = make('div', { id: 'series' });
  page.chart = make('div', { id: 'chart' });
  page.key = make('div', { class: 'key', id: 'key' });
  page.details = make('div', { id: 'details' });
  page.main = make('div', { id: 'main', hidden: true },
    make('aside', {}, page.series, page.runs),
    make('main', {}, page.headline,
      make('section', { class: 'card' }, page.chart, page.key), page.details));
  page.empty = make('div', { id: 'empty', hidden: true });
  document.body.append(page.main, page.empty);
  addEventListener('resize', draw);
  document.addEventListener('visibilitychange', () => document.hidden || look());
  await look();
  loop();
}

// Data --------------------------------------------------------------------------------

let busy = false;
let quiet = 0;

async function loop() {
  for (;;) {
    await new Promise((done) => setTimeout(done, quiet > QUIET ? REST : POLL));
    if (!document.hidden) await look();
  }
}

/** Ask for runs, points and details; draw what changed. */
async function look() {
  if (busy) return;
  busy = true;
  try {
    const { runs } = await ask('./runs');
    const listed = changed('runs', runs);
    if (!runs.length) return nothing();
    page.main.hidden = false;
    page.empty.hidden = true;
    if (!runs.some((run) => run.name === state.run)) focus(runs[0].name, null);
    if (listed) drawControls();
    if (!page.chart.firstChild) quietly(page.chart, 'Reading…');
    const points = await fetchPoints();
    const details = await fetchDetails();
    if (listed || points || details) draw();
    quiet = listed || points || details ? 0 : quiet + 1;
  } catch (error) {
    quiet += 1;
    const problem = `TensorBoard does not answer (${error.message}).`;
    if (page.main.hidden) nothing(problem);
    else if (!page.chart.querySelector('svg')) quietly(page.chart, problem);
  } finally {
    busy = false;
  }
}

const quietly = (host, words) => host.replaceChildren(make('p', { class: 'quiet' }, words));

/** Draw all but the controls. */
function draw() {
  drawChart();
  drawHeadline();
  drawDetails();
}

async function ask(address, form = null) {
  const answer = await fetch(address, form ? { method: 'POST', body: form } : {});
  if (!answer.ok) throw new Error(`${answer.status} ${answer.statusText}`);
  return answer.json();
}

/** Store an answer; return whether it differs from the last one. */
function changed(name, value) {
  const same = JSON.stringify(state[name]) === JSON.stringify(value);
  state[name] = value;
  return !same;
}

function fetchPoints() {
  const form = new FormData();
  form.set('runs', JSON.stringify(shownRuns().map((run) => run.name)));
  form.set('names', JSON.stringify([...ticked()]));
  return ask('./series', form).then((data) => changed('data', data));
}

function fetchDetails() {
  const step = state.step === null ? '' : `&step=${state.step}`;
  return ask(`./details?run=${encodeURIComponent(state.run)}${step}`)
    .catch((error) => ({ problem: `cannot be read (${error.message})` }))
    .then((details) => changed('details', details));
}

/** Ask for the series that are not listed with their run. */
async function fetchMore() {
  const { run, part } = state;
  const more = await ask(`./names?run=${encodeURIComponent(run)}&part=${encodeURIComponent(part)}`);
  if (run !== state.run || part !== state.part) return;
  state.more = more;
  drawMore();
}

async function refresh() {
  await fetchPoints();
  drawChart();
}

function focus(run, step) {
  state.run = run;
  state.step = step;
}

async function choose(run, step) {
  focus(run, step);
  drawControls();
  drawChart();
  await fetchDetails();
  draw();
}

const shownRuns = () => state.runs.filter((run) => !state.hidden.has(run.name));

/** Return all names to tick: special series first, then estimators, fresh ones, then returns. */
function names() {
  const runs = [...state.runs.filter((run) => run.name === state.run), ...state.runs];  // in focus first
  const union = (key) => [...new Set(runs.flatMap((run) => run[key]))];
  const order = ['settled', 'provisional', 'auto', 'NFIS'];
  const rank = (name) => (order.includes(name) ? order.indexOf(name) : order.length);
  const all = union('series');
  const first = all.filter((name) => name !== 'fresh').sort((a, b) => rank(a) - rank(b)).slice(0, SERIES - 1);
  const chosen = [...state.ticked ?? []].filter((name) => !RETURNS.has(name) && name !== 'fresh');
  const fresh = all.includes('fresh') ? ['fresh'] : [];
  return { series: [...new Set([...first, ...chosen, ...fresh])], returns: union('returns') };
}

function ticked() {
  if (state.ticked) return state.ticked;
  const { series, returns } = names();
  const special = series.filter((name) => SPECIAL.has(name));
  const usual = special.some((name) => name !== 'fresh')
    ? special : [...series.filter((name) => name !== 'fresh').slice(0, 1), ...special];
  return new Set([...usual, ...returns]);
}

// Colours -----------------------------------------------------------------------------

/** One run: a colour for each series. Several: a colour for each run. */
function colour(run, name) {
  if (shownRuns().length > 1) return runColour(run);
  return SPECIAL.get(name) ?? RETURNS.get(name) ?? slot(state.tones, plain(), name);
}

/** Return the ticked estimators: each has a colour, and past the eighth a dash. */
const plain = () => names().series.filter((name) => ticked().has(name) && !SPECIAL.has(name));

/** Return the colour of one of those that have one, kept as long as it has it; grey for others. */
function slot(slots, now, name) {
  for (const other of slots.keys()) if (!now.includes(other)) slots.delete(other);
  for (const other of now) {
    if (slots.has(other)) continue;
    const taken = new Set(slots.values());
    slots.set(other, [...Array(now.length).keys()].find((place) => !taken.has(place)));
  }
  return slots.has(name) ? `var(--s${slots.get(name) % COLOURS})` : 'var(--faint)';
}

const crowded = () => shownRuns().length > COLOURS;

/** Return the runs that have a colour: all, or of too many the one in focus and the chosen ones. */
function coloured() {
  const all = shownRuns().map((run) => run.name);
  if (!crowded()) return all;
  const first = (run) => (run === state.run ? 0 : 1);
  return all.filter((run) => run === state.run || state.chosen.has(run))
    .sort((a, b) => first(a) - first(b)).slice(0, COLOURS);
}

const runColour = (run) => slot(state.slots, coloured(), run);

function kind(name) {
  if (RETURNS.has(name)) return 'return';
  return SPECIAL.has(name) ? name : 'estimate';
}

// Headline ----------------------------------------------------------------------------

/** Return what the headline and the cards are about: free values, an evaluation, or both. */
function subject() {
  const { free, evaluation } = state.details ?? {};
  if (!free || !evaluation || free.step === evaluation.step) return { free, evaluation };
  const away = ({ step }) => (state.step === null ? -step : Math.abs(step - state.step));
  return away(evaluation) < away(free) ? { evaluation } : { free };
}

function drawHeadline() {
  const { free, evaluation } = subject();
  const point = lastPoint();
  const shown = free ? { step: free.step, ...lead(free) } : evaluation && {
    step: evaluation.step, data: evaluation.data, headline: evaluation.headline,
    verdict: evaluation.estimates.find((row) => row.name === evaluation.recommended)?.verdict,
  };
  const step = shown?.step ?? point?.step;
  const where = [];
  if (state.runs.length > 1 || state.run !== '.') where.push(make('span', { title: state.run }, shorten(state.run, 60)));
  if (defined(step)) where.push(`step ${step.toLocaleString('en')}`);
  if (shown) where.push(shown.data);
  const line = make('div', { class: 'where' }, ...where.flatMap((part, k) => (k ? [' · ', part] : [part])));
  if (state.step !== null) {
    line.append(' ', make('button', { onclick: () => choose(state.run, null) }, 'show the latest'));
  }
  const said = shown ?? (point && { headline: pointInWords(point), verdict: VERDICTS[point.verdict] });
  page.headline.replaceChildren(line);
  if (said) page.headline.append(make('h1', {}, said.verdict ? badge(said.verdict) : '', said.headline));
  if (shown && state.step !== null && shown.step !== state.step) {
    page.headline.append(make('p', { class: 'quiet' },
      `TensorBoard kept no details of step ${state.step.toLocaleString('en')}; these belong to the nearest step, ${shown.step.toLocaleString('en')}. `
      + '--samples_per_plugin ope=1000 keeps more.'));
  }
}

const pointInWords = (point) => `The policy is worth ${brief(point.value)}`
  + (defined(point.low) && defined(point.high) ? ` (${brief(point.low)} to ${brief(point.high)})` : '')
  + (defined(point.fresh_episodes) ? `, as sure as about ${brief(point.fresh_episodes, 2)} fresh episodes would make you.`
    : `, by ${label(point.name)}.`);

/** Return the chosen or last point of the run in focus: of runs that were written without details. */
function lastPoint() {
  const { series = {}, numbers = {} } = of(state.data, state.run) ?? {};
  const points = names().series.filter((name) => name !== 'fresh' && of(series, name)?.step.length)
    .map((name) => {
      const all = pointsOf(of(series, name));
      return { name, ...(all.find((p) => p.step === state.step) ?? all.at(-1)) };
    });
  if (!points.length) return null;
  const exact = points.filter((p) => p.step === state.step);
  const point = (exact.length ? exact : points).reduce((a, b) => (b.step > a.step ? b : a));
  if (point.name !== judged(Object.keys(series))) return point;
  const at = (columns) => columns?.value[columns.step.indexOf(point.step)];
  return { ...point, fresh_episodes: at(numbers.fresh_episodes), verdict: at(numbers.verdict) };
}

/** Return the series that `ope/fresh_episodes` and `ope/verdict` belong to. */
function judged(series) {
  return ['provisional', 'auto', 'NFIS', ...series].find((name) => series.includes(name));
}

// Controls ----------------------------------------------------------------------------

function drawControls() {
  const { series, returns } = names();
  page.series.replaceChildren(
    make('h2', {}, 'Estimates'), ...series.map(tick), page.more,
    ...(returns.length ? [make('h2', {}, 'Returns'), ...returns.map(tick)] : []));
  drawMore();
  drawRuns();
}

function tick(name) {
  const box = make('input', { type: 'checkbox', onchange: () => toggle(name) });
  box.checked = ticked().has(name);
  const alone = shownRuns().length === 1 && box.checked;
  return make('label', { 'data-name': name }, box, alone ? swatch(colour(state.run, name)) : null, label(name));
}

/** List the series that a run has beside the first ones, once somebody wants to see them. */
function drawMore() {
  const count = state.runs.find((run) => run.name === state.run)?.more ?? 0;
  page.more.hidden = !count;
  page.more.querySelector('summary').textContent = `${count.toLocaleString('en')} more`;
  const listed = new Set(names().series);
  const rest = state.more.count - state.more.names.length;
  page.matches.replaceChildren(...state.more.names.filter((name) => !listed.has(name)).map(tick),
    rest > 0 ? make('p', { class: 'quiet' }, `and ${rest.toLocaleString('en')}: filter them`) : '');
}

function drawRuns() {
  if (state.runs.length < 2) return page.runs.replaceChildren();
  const row = (run) => {
    const box = make('input', { type: 'checkbox', onchange: () => show(run.name, box.checked) });
    box.checked = !state.hidden.has(run.name);
    const shown = box.checked && shownRuns().length > 1;
    return make('div', {
      class: run.name === state.run ? 'run focus' : 'run', 'data-run': run.name,
      onmouseenter: () => light(page.chart, run.name), onmouseleave: () => light(page.chart, null),
    }, box, shown ? square(run.name) : '',
      make('button', { class: 'name', title: run.name, onclick: () => pick(run.name) }, called.get(run.name)));
  };
  const called = labels(state.runs.map((run) => run.name));
  const match = state.runs.filter((run) => run.name.toLowerCase().includes(state.filter.toLowerCase()));
  const parts = [make('h2', {}, `Runs (${state.runs.length})`)];
  if (state.runs.length > 8) {
    const input = page.filter ?? make('input', {
      type: 'search', placeholder: 'filter runs',
      oninput: (event) => { state.filter = event.target.value; drawRuns(); page.filter.focus(); },
    });
    page.filter = input;
    parts.push(input);
  }
  if (state.runs.length > 2) {
    parts.push(make('div', { class: 'buttons' },
      make('button', { onclick: () => only(match.map((run) => run.name)) }, 'all'),
      make('button', { onclick: () => only([state.run]) }, 'only this')));
  }
  parts.push(...match.slice(0, LISTED).map(row));
  if (match.length > LISTED) parts.push(make('p', { class: 'quiet' }, `${match.length - LISTED} more: filter them`));
  page.runs.replaceChildren(...parts);
}

/** Draw the colour of a run; where only some runs have one, a click gives or takes it. */
function square(run) {
  const element = swatch(runColour(run));
  if (!crowded()) return element;
  element.classList.add('choose');
  element.title = 'give this run a colour, or take it away';
  return pressable(element, () => {
    if (!state.chosen.delete(run)) state.chosen.add(run);
    drawRuns();
    drawChart();
  });
}

function toggle(name) {
  const next = new Set(ticked());
  if (!next.delete(name)) next.add(name);
  state.ticked = next;
  drawControls();
  refresh();
}

function show(run, visible) {
  if (visible) state.hidden.delete(run);
  else state.hidden.add(run);
  drawControls();
  refresh();
}

function only(runs) {
  state.hidden = new Set(state.runs.map((run) => run.name).filter((name) => !runs.includes(name)));
  drawControls();
  refresh();
}

function pick(run) {
  const back = state.hidden.delete(run);
  choose(run, null);
  if (back) refresh();
}

// Chart -------------------------------------------------------------------------------

const pointsOf = (columns) => columns.step.map((step, k) => Object.fromEntries(
  Object.entries(columns).map(([end, column]) => [end, column[k]])));

/** Return the lines of the chart: estimates first, so that returns are not hidden by bands. */
function lines() {
  const called = labels(state.runs.map((run) => run.name));
  const order = { estimate: 0, settled: 1, provisional: 2, return: 3, fresh: 4 };
  const place = (line) => order[line.kind] + (line.strong ? 10 : line.faint ? -10 : 0);
  return shownRuns().flatMap((run) => linesOf(run, called.get(run.name)))
    .sort((a, b) => place(a) - place(b));
}

/** Return the lines of a run; of one that has no colour only the first. */
function linesOf(run, called) {
  const data = of(state.data, run.name);
  if (!data) return [];
  const several = shownRuns().length > 1;
  const faint = !coloured().includes(run.name);
  const main = names().series.filter((name) => ticked().has(name) && name !== 'fresh');
  const first = [...main, 'fresh'].find((name) => of(data.series, name)?.step.length);
  const { step = [], value = [] } = data.numbers.verdict ?? {};
  const verdicts = new Map(step.map((at, k) => [at, value[k]]));
  return Object.entries({ ...data.series, ...data.returns })
    .filter(([name, columns]) => ticked().has(name) && columns.step.length && (!faint || name === first))
    .map(([name, columns]) => ({
      run: run.name, called, name, label: label(name), kind: kind(name), colour: colour(run.name, name),
      strong: run.name === state.run || !several, faint,
      alone: first === 'fresh',  // nothing else tells the value of its policies
      dash: kind(name) === 'estimate' ? dash(name, several) : undefined,
      points: pointsOf(columns).map((p) => ({
        ...p, verdict: 'verdict' in columns ? p.verdict : name === judged(run.series) ? verdicts.get(p.step) : undefined,
      })),
    }));
}

/** Tell estimators apart that share a colour. */
const dash = (name, several) => DASHES[
  (several ? plain().indexOf(name) : Math.floor(state.tones.get(name) / COLOURS)) % DASHES.length];

function drawChart() {
  const shown = lines();
  if (!shown.length) {
    quietly(page.chart, 'Nothing is ticked, or nothing was written yet.');
    page.key.replaceChildren();
    return;
  }
  const few = coloured().length <= BANDED;
  const bands = (line) => line.run === state.run || (few && !line.faint);
  const thin = (line) => (bands(line) ? line : { ...line, points: line.points.map((p) => ({ ...p, verdict: undefined })) });
  const { free, evaluation } = subject();
  const step = state.step ?? (free ?? evaluation)?.step ?? null;
  trainingChart(page.chart, shown.map(thin), { selected: { step }, select: choose, bands });
  drawKey(shown);
}

function drawKey(shown) {
  const parts = [];
  if (shownRuns().length === 1) {
    for (const line of shown) parts.push(sample(line, line.label));
  } else {
    const bright = shown.filter((line) => !line.faint);
    const kinds = new Map(bright.map((line) => [`${line.kind}${line.dash ?? ''}`, line]));
    for (const line of kinds.values()) parts.push(sample({ ...line, colour: 'var(--ink)' }, line.label));
  }
  if (shown.some((line) => line.points.some((p) => defined(p.verdict)))) {
    parts.push(make('span', { class: 'verdicts' }, 'verdict: ',
      ...['green', 'amber', 'red'].map((colour) => make('span', {}, make('i', { class: `point ${colour}` }), colour))));
  }
  if (crowded()) {
    parts.push(sample({ kind: 'estimate', colour: 'var(--faint)' },
      `${shownRuns().length - coloured().length} other runs: click a name to look at one, its square to colour it`));
  }
  parts.push(make('span', { class: 'quiet' }, 'click a step for its details, or use the arrow keys'));
  page.key.replaceChildren(...parts);
}

function sample(line, label) {
  const look = make('i', { class: `sample ${line.kind}` });
  look.style.setProperty('--colour', line.colour);
  return make('span', {}, look, label);
}

// Details -----------------------------------------------------------------------------

function drawDetails() {
  const { record, ranking, problem } = state.details ?? {};
  const made = [];
  try {
    const { free, evaluation } = subject();
    if (free) made.push(...freeCards(free, record, (step) => choose(state.run, step)));
    made.push(...cards(evaluation, ranking, free));
    if (problem) made.unshift(unreadable(problem));
  } catch (error) {  // a document of the right form that makes no sense
    made.push(unreadable(`cannot be read (${error.message})`));
  }
  if (!made.length) {
    made.push(make('p', { class: 'quiet' },
      'This run has no details of its evaluations: write them with EvaluationWriter, FreeWriter or OPECallback.'));
  }
  arrange(page.details, made);
}

const unreadable = (problem) => card('problem', 'Details of this run', '',
  make('p', {}, `Part of what this run holds ${problem}. Another version of ope_gym may have written it.`));

function nothing(problem = '') {
  page.main.hidden = true;
  page.empty.hidden = false;
  const code = (text) => make('pre', {}, text);
  page.empty.replaceChildren(
    make('h1', {}, problem || 'No evaluations yet'),
    make('p', {}, 'This tab shows what a policy is worth while it trains, estimated from recorded steps. '
      + 'There are no evaluations in this log directory yet. Each of these writes some, and they appear here by themselves:'),
    make('h3', {}, 'Try it'), code('python train.py --env CartPole-v1\ntensorboard --logdir runs'),
    make('h3', {}, 'In Stable-Baselines3'),
    code('from wrappers.sb3 import OPECallback\n\nmodel = PPO("MlpPolicy", env, tensorboard_log="runs")\nmodel.learn(100_000, callback=OPECallback())'),
    make('h3', {}, 'In your own loop'),
    code('from ope_gym.report.tensorboard import EvaluationWriter\n\nwith EvaluationWriter("runs/mine") as writer:\n    writer.add_evaluation(ope_gym.evaluate(episodes, policy), step)'));
}
