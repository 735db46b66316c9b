// The OPE tab: what the current policy is worth, over training and in detail.

import { badge, cards } from './evaluation.js';
import { freeCards, lead } from './free.js';
import { brief, labels, make, shorten } from './svg.js';
import { defined, light, swatch, trainingChart } from './training.js';

const POLL = 5000;  // milliseconds between looks while something changes
const REST = 30000;  // and where nothing did for a while
const QUIET = 12;  // looks without a change after which it rests
const COLOURS = 8;  // runs that can be told apart; of more, those in focus or chosen have a colour
const BANDED = 6;  // coloured runs with a band each; of more only the one in focus has one
const LISTED = 200;  // runs in the list at most
const DASHES = ['', '8 4', '3 4', '8 3 2 3'];  // of estimators that share a colour
const LABELS = {
  settled: 'settled estimate', provisional: 'provisional estimate', fresh: 'fresh evaluations',
  'rollout/return': 'return of rollouts', 'rollout/ep_rew_mean': 'return of rollouts',
  'eval/mean_reward': 'return of evaluation episodes',
};
const SPECIAL = { settled: 'var(--s0)', provisional: 'var(--s5)', fresh: 'var(--fresh)' };
const VERDICTS = ['red', 'amber', 'green'];
const RETURNS = {
  'rollout/return': 'var(--return)', 'rollout/ep_rew_mean': 'var(--return)',
  'eval/mean_reward': 'var(--eval)',
};

const state = {
  runs: [],  // as the server lists them, the latest first
  hidden: new Set(),  // runs that were unticked
  ticked: null,  // names of series and returns; null: the usual ones
  chosen: new Set(),  // runs that were given a colour where there are too many
  slots: new Map(),  // place in the palette by run
  tones: new Map(),  // and by estimator
  run: null,  // in focus
  step: null,  // chosen; null: the last one
  data: {},  // points by run
  details: null,  // of the run and step in focus
  filter: '',
  changed: 0,  // time of the last change, 0: none yet
};
const page = {};

export async function render() {
  document.head.append(make('link', { rel: 'stylesheet', href: './style.css' }));
  theme();
  page.headline = make('header', { id: 'headline' });
  page.runs = make('div', { id: 'runs' });
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
  addEventListener('resize', () => {
    drawChart();
    drawDetails();
  });
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
    if (!page.chart.firstChild) page.chart.append(make('p', { class: 'quiet' }, 'Reading…'));
    const points = await fetchPoints();
    const details = await fetchDetails();
    if (listed || points) drawChart();
    if (points || details) drawHeadline();
    if (details) drawDetails();
    quiet = listed || points || details ? 0 : quiet + 1;
  } catch (error) {
    quiet += 1;
    if (page.main.hidden) nothing(`TensorBoard does not answer (${error.message}).`);
  } finally {
    busy = false;
  }
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
    .then((details) => changed('details', details));
}

async function refresh() {
  await fetchPoints();
  drawChart();
}

async function focus(run, step) {
  state.run = run;
  state.step = step;
}

async function choose(run, step) {
  focus(run, step);
  drawControls();
  drawChart();
  await fetchDetails();
  drawHeadline();
  drawDetails();
}

const shownRuns = () => state.runs.filter((run) => !state.hidden.has(run.name));

/** Return all names to tick: special series first, then estimators, then returns. */
function names() {
  const union = (key) => [...new Set(state.runs.flatMap((run) => run[key]))];
  const series = union('series');
  const order = ['settled', 'provisional', 'auto', 'NFIS'];
  const rank = (name) => (order.includes(name) ? order.indexOf(name) : name === 'fresh' ? 99 : 50);
  series.sort((a, b) => rank(a) - rank(b));
  return { series, returns: union('returns') };
}

function ticked() {
  if (state.ticked) return state.ticked;
  const { series, returns } = names();
  const special = series.filter((name) => name in SPECIAL);
  const usual = special.some((name) => name !== 'fresh')
    ? special : [...series.filter((name) => name !== 'fresh').slice(0, 1), ...special];
  return new Set([...usual, ...returns]);
}

// Colours -----------------------------------------------------------------------------

/** One run: a colour for each series. Several: a colour for each run. */
function colour(run, name) {
  if (shownRuns().length > 1) return runColour(run);
  if (name in SPECIAL) return SPECIAL[name];
  if (name in RETURNS) return RETURNS[name];
  return slot(state.tones, plain(), name);
}

/** Return the ticked estimators: each has a colour, and past the eighth a dash. */
const plain = () => names().series.filter((name) => ticked().has(name) && !(name in SPECIAL));

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
  if (name in RETURNS) return 'return';
  return name in SPECIAL ? name : 'estimate';
}

/** Follow TensorBoard's own switch between light and dark, or else the system's. */
function theme() {
  const system = matchMedia('(prefers-color-scheme: dark)');
  const parent = (() => {
    try {
      return window.parent !== window ? window.parent.document.body : null;
    } catch {
      return null;
    }
  })();
  const apply = () => {
    const dark = parent ? parent.classList.contains('dark-mode') : system.matches;
    document.documentElement.dataset.theme = dark ? 'dark' : 'light';
  };
  apply();
  system.addEventListener('change', apply);
  if (parent) new MutationObserver(apply).observe(parent, { attributes: true, attributeFilter: ['class'] });
}

// Headline ----------------------------------------------------------------------------

/** Return what the headline and the cards are about: free values, an evaluation, or both. */
function subject() {
  const { free, evaluation } = state.details ?? {};
  if (!free || !evaluation || free.step === evaluation.step) return { free, evaluation };
  const away = (found) => (state.step === null ? -found.step : Math.abs(found.step - state.step));
  return away(evaluation) < away(free) ? { evaluation } : { free };
}

function drawHeadline() {
  const { free, evaluation } = subject();
  const last = lastPoint();
  const found = free ? { step: free.step, ...lead(free) } : evaluation && {
    step: evaluation.step, data: evaluation.data, headline: evaluation.headline,
    verdict: evaluation.estimates.find((row) => row.name === evaluation.recommended)?.verdict,
  };
  const step = found?.step ?? last?.step;
  const many = state.runs.length > 1;
  const where = [];
  if (many || state.run !== '.') where.push(make('span', { title: state.run }, shorten(state.run, 60)));
  if (defined(step)) where.push(`step ${step.toLocaleString('en')}`);
  if (found) where.push(found.data);
  const line = make('div', { class: 'where' }, ...where.flatMap((part, k) => (k ? [' · ', part] : [part])));
  if (state.step !== null) {
    line.append(' ', make('button', { onclick: () => choose(state.run, null) }, 'show the latest'));
  }
  page.headline.replaceChildren(line);
  if (found) {
    page.headline.append(make('h1', {}, found.verdict ? badge(found.verdict) : '', found.headline));
    if (state.step !== null && found.step !== state.step) {
      page.headline.append(make('p', { class: 'quiet' },
        `TensorBoard kept no details of step ${state.step.toLocaleString('en')}; these belong to the nearest step, ${found.step.toLocaleString('en')}. `
        + '--samples_per_plugin ope=1000 keeps more.'));
    }
  } else if (last) {
    page.headline.append(make('h1', {}, defined(last.verdict) ? badge(VERDICTS[last.verdict]) : '',
      `The policy is worth ${brief(last.value)}`
      + (defined(last.low) && defined(last.high) ? ` (${brief(last.low)} to ${brief(last.high)})` : '')
      + (defined(last.fresh_episodes) ? `, as sure as about ${brief(last.fresh_episodes, 2)} fresh episodes would make you.`
        : `, by ${LABELS[last.name] ?? last.name}.`)));
  }
}

/** Return the chosen or last point of the run in focus: of runs that were written without details. */
function lastPoint() {
  const { series = {}, numbers = {} } = state.data[state.run] ?? {};
  const found = names().series.filter((name) => name !== 'fresh' && series[name]?.step.length)
    .map((name) => {
      const points = pointsOf(series[name]);
      return { name, ...(points.find((p) => p.step === state.step) ?? points.at(-1)) };
    });
  if (!found.length) return null;
  const exact = found.filter((p) => p.step === state.step);
  const point = (exact.length ? exact : found).reduce((a, b) => (b.step > a.step ? b : a));
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
  const one = shownRuns().length === 1;
  const tick = (name) => {
    const box = make('input', { type: 'checkbox', onchange: () => toggle(name) });
    box.checked = ticked().has(name);
    const colours = one && box.checked ? [swatch(colour(state.run, name))] : [];
    return make('label', { 'data-name': name }, box, ...colours, LABELS[name] ?? name);
  };
  page.series.replaceChildren(
    make('h2', {}, 'Estimates'), ...series.map(tick),
    ...(returns.length ? [make('h2', {}, 'Returns'), ...returns.map(tick)] : []));
  drawRuns();
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
      make('a', { title: run.name, onclick: () => pick(run.name) }, label.get(run.name)));
  };
  const label = labels(state.runs.map((run) => run.name));
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
  element.addEventListener('click', () => {
    if (!state.chosen.delete(run)) state.chosen.add(run);
    drawRuns();
    drawChart();
  });
  return element;
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
  const several = shownRuns().length > 1;
  const estimates = plain();
  const main = names().series.filter((name) => ticked().has(name) && name !== 'fresh');
  const bright = new Set(coloured());
  const called = labels(state.runs.map((run) => run.name));
  const found = [];
  for (const run of shownRuns()) {
    const data = state.data[run.name];
    if (!data) continue;
    const faint = !bright.has(run.name);
    const first = [...main, 'fresh'].find((name) => data.series[name]?.step.length);
    const verdicts = new Map((data.numbers.verdict?.step ?? [])
      .map((step, k) => [step, data.numbers.verdict.value[k]]));
    const all = { ...data.series, ...data.returns };
    for (const [name, columns] of Object.entries(all)) {
      if (!ticked().has(name) || !columns.step.length) continue;
      if (faint && name !== first) continue;  // one grey line a run
      const own = 'verdict' in columns;
      const points = pointsOf(columns).map((p) => ({
        ...p, verdict: own ? p.verdict : name === judged(run.series) ? verdicts.get(p.step) : undefined,
      }));
      const line = {
        run: run.name, called: called.get(run.name), name, label: LABELS[name] ?? name, kind: kind(name),
        colour: colour(run.name, name), points, strong: run.name === state.run || !several, faint,
        alone: first === 'fresh',  // nothing else tells the value of its policies
      };
      if (line.kind === 'estimate') {
        const index = several ? estimates.indexOf(name)
          : Math.floor(state.tones.get(name) / COLOURS);
        line.dash = DASHES[index % 4];
      }
      found.push(line);
    }
  }
  const order = { estimate: 0, settled: 1, provisional: 2, return: 3, fresh: 4 };
  const place = (line) => order[line.kind] + (line.strong ? 10 : line.faint ? -10 : 0);
  return found.sort((a, b) => place(a) - place(b));
}

function drawChart() {
  const shown = lines();
  if (!shown.length) {
    page.chart.replaceChildren(make('p', { class: 'quiet' }, 'Nothing is ticked, or nothing was written yet.'));
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
  parts.push(make('span', { class: 'quiet' }, 'click a step for its details'));
  page.key.replaceChildren(...parts);
}

function sample(line, label) {
  const look = make('i', { class: `sample ${line.kind}` });
  look.style.setProperty('--colour', line.colour);
  return make('span', {}, look, label);
}

// Details -----------------------------------------------------------------------------

function drawDetails() {
  const { free, evaluation } = subject();
  const { record, ranking } = state.details ?? {};
  const made = [...(free ? freeCards(free, record, (step) => choose(state.run, step)) : []),
    ...cards(evaluation, ranking, free)];
  if (!made.length) {
    made.push(make('p', { class: 'quiet' },
      'This run has no details of its evaluations: write them with EvaluationWriter, FreeWriter or OPECallback.'));
  }
  const wide = page.details.clientWidth > 860;  // two columns, by turns
  const column = (turn) => make('div', {}, ...made.filter((_, k) => !wide || k % 2 === turn));
  page.details.replaceChildren(...(wide ? [column(0), column(1)] : [column(0)]));
}

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
