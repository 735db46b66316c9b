// The little that all charts share: elements, scales, ticks, numbers in words.

const SPACE = 'http://www.w3.org/2000/svg';

/** Make an SVG element: `draw('circle', {r: 3}, parent)`. */
export function draw(name, attributes = {}, parent = null, text = null) {
  const element = document.createElementNS(SPACE, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== null) element.textContent = text;
  if (parent) parent.append(element);
  return element;
}

/** Make an HTML element: `make('p', {class: 'note'}, 'text', child)`. */
export function make(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith('on')) element.addEventListener(key.slice(2), value);
    else if (value === true) element.setAttribute(key, '');
    else if (value !== false && value !== null) element.setAttribute(key, value);
  }
  element.append(...children.filter((child) => child !== null));
  return element;
}

/** Return a function from data to pixels, linear or logarithmic. */
export function scale([low, high], [from, to], log = false) {
  const of = log ? Math.log10 : (x) => x;
  const span = of(high) - of(low) || 1;
  return (x) => from + ((of(x) - of(low)) / span) * (to - from);
}

/** Return round numbers within [low, high], about so many. */
export function ticks(low, high, count = 5) {
  const raw = (high - low) / count;
  if (!(raw > 0)) return [low];
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = power * [1, 2, 5, 10].find((m) => m * power >= raw * 0.999);
  const found = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9; k++) {
    found.push(k * step);
  }
  return found;
}

/** Return powers of ten within [low, high]; of few also 2 and 5 times them. */
export function logTicks(low, high) {
  const found = [];
  const decades = Math.log10(high / low);
  for (let p = Math.floor(Math.log10(low)); p <= Math.ceil(Math.log10(high)); p++) {
    for (const m of decades < 2 ? [1, 2, 5] : [1]) found.push(m * 10 ** p);
  }
  return found.filter((x) => x >= low * 0.999 && x <= high * 1.001);
}

/** Say a number briefly: 1234567 is "1.23M", 0.1234 is "0.123". */
export function brief(x, digits = 3) {
  if (x === null || x === undefined || Number.isNaN(x)) return 'undefined';
  const size = Math.abs(x);
  for (const [unit, letter] of [[1e9, 'G'], [1e6, 'M'], [1e4, 'k']]) {
    if (size >= unit) {
      const part = x / (letter === 'k' ? 1e3 : unit);
      return `${trim(part.toPrecision(Math.max(digits, String(Math.trunc(Math.abs(part))).length)))}${letter}`;
    }
  }
  if (size !== 0 && size < 1e-4) return x.toExponential(1);
  const whole = String(Math.trunc(size)).length;
  return trim(size >= 1 ? x.toFixed(Math.max(0, digits - whole)) : x.toPrecision(digits));
}

function trim(text) {
  return text.includes('.') && !text.includes('e') ? text.replace(/\.?0+$/, '') : text;
}

export function percent(share) {
  if (share === null) return 'undefined';
  const said = 100 * share;
  return `${said > 0 && said < 0.1 ? '<0.1' : trim(said.toFixed(said < 10 ? 1 : 0))} %`;
}

/** Return the points that survive at least so many pixels apart; the last one always does. */
export function thinned(points, gap) {
  let before = -Infinity;
  return points.filter((p, i) => {
    const keep = p.x - before >= gap || i === points.length - 1;
    if (keep) before = p.x;
    return keep;
  });
}

/** Cut a name in the middle, so that both ends are seen. */
export function shorten(name, most) {
  if (name.length <= most) return name;
  const head = Math.ceil((most - 1) / 2);
  return `${name.slice(0, head)}…${name.slice(name.length - (most - 1 - head))}`;
}

/**
 * Return labels by name that tell names apart in about so many characters.
 *
 * Folders that all names share are left out, but for the last one where a bare number would be
 * left. A longer name keeps its beginning, which says what it is, and what follows the words that
 * it shares with the name most like it.
 */
export function labels(names, most = 24) {
  const all = names.length > 1 ? shared(names).replace(/[^/]*$/, '') : '';
  const bare = names.some((name) => !/[A-Za-z]/.test(name.slice(all.length)));
  const folders = (bare ? all.replace(/[^/]*\/$/, '') : all).length;
  const sorted = names.map((name) => name.slice(folders)).sort();
  const found = new Map(names.map((name) => {
    const own = name.slice(folders);
    const at = sorted.indexOf(own);
    const like = [sorted[at - 1], sorted[at + 1]].filter((other) => other !== undefined)
      .map((other) => shared([own, other]).replace(/[A-Za-z0-9.]*$/, '').length);
    return [name, fitted(own, Math.max(0, ...like), most)];
  }));
  const clear = new Set(found.values()).size === found.size;
  return clear ? found : new Map(names.map((name) => [name, name.slice(folders)]));
}

/** Return what all names begin with. */
function shared(names) {
  let size = 0;
  while (names.every((name) => size < name.length && name[size] === names[0][size])) size += 1;
  return names[0].slice(0, size);
}

/** Cut a name whose first characters, so many, are shared with another one. */
function fitted(name, same, most) {
  if (name.length <= most) return name;
  const end = name.slice(same);
  const head = Math.min(same, Math.max(most - 1 - end.length, 8));
  if (head < 8) return shorten(name, most);
  const room = most - 1 - head;
  return `${name.slice(0, head)}…${end.length <= room ? end : `${end.slice(0, room - 1)}…`}`;
}

/** Make an empty chart with axes; return its svg and scales. */
export function frame({
  width, height, margin, x, y, xLog = false, yLog = false, xTicks = null, yTicks = null,
  xFormat = brief, yFormat = brief, xTitle = '', yTitle = '', label = '',
}) {
  const svg = draw('svg', {
    viewBox: `0 0 ${width} ${height}`, width: '100%', role: 'img', 'aria-label': label,
  });
  const area = {
    left: margin.left, right: width - margin.right, top: margin.top, bottom: height - margin.bottom,
  };
  const toX = scale(x, [area.left, area.right], xLog);
  const toY = scale(y, [area.bottom, area.top], yLog);
  const axes = draw('g', { class: 'axes' }, svg);
  for (const tick of yTicks ?? (yLog ? logTicks(...y) : ticks(...y))) {
    const at = toY(tick);
    draw('line', { class: 'grid', x1: area.left, x2: area.right, y1: at, y2: at }, axes);
    draw('text', { x: area.left - 8, y: at + 4, 'text-anchor': 'end' }, axes, yFormat(tick));
  }
  for (const tick of xTicks ?? (xLog ? logTicks(...x) : ticks(...x, Math.max(2, width / 130)))) {
    const at = toX(tick);
    draw('line', { class: 'tick', x1: at, x2: at, y1: area.bottom, y2: area.bottom + 4 }, axes);
    draw('text', { x: at, y: area.bottom + 18, 'text-anchor': 'middle' }, axes, xFormat(tick));
  }
  draw('line', { class: 'base', x1: area.left, x2: area.right, y1: area.bottom, y2: area.bottom }, axes);
  if (xTitle) {
    draw('text', { class: 'title', x: area.right, y: height - 4, 'text-anchor': 'end' }, axes, xTitle);
  }
  if (yTitle) draw('text', { class: 'title', x: 2, y: 12 }, axes, yTitle);
  const clip = `clip-${Math.random().toString(36).slice(2)}`;
  const shape = draw('clipPath', { id: clip }, draw('defs', {}, svg));
  draw('rect', {
    x: area.left - 1, y: area.top - 1,
    width: Math.max(area.right - area.left + 2, 0), height: Math.max(area.bottom - area.top + 2, 0),
  }, shape);
  return { svg, area, toX, toY, clip: `url(#${clip})` };
}

export function path(points) {
  return points.map((p, i) => `${i ? 'L' : 'M'}${p.x.toFixed(1)} ${p.y.toFixed(1)}`).join('');
}
