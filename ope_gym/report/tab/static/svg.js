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

/** Let an element be pressed: by the pointer, or by Enter and the space bar. */
export function pressable(element, press) {
  for (const [name, value] of [['tabindex', 0], ['role', 'button']]) element.setAttribute(name, value);
  element.addEventListener('click', press);
  element.addEventListener('keydown', (event) => {
    if (event.key !== 'Enter' && event.key !== ' ') return;
    event.preventDefault();
    press();
  });
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
  const first = Math.ceil(low / step - 1e-9);
  const last = Math.floor(high / step + 1e-9);
  return Array.from({ length: last - first + 1 }, (_, k) => (first + k) * step);
}

/** Return powers of ten within [low, high]; of few also 2 and 5 times them. */
export function logTicks(low, high) {
  const steps = Math.log10(high / low) < 2 ? [1, 2, 5] : [1];
  const first = Math.floor(Math.log10(low));
  return Array.from({ length: Math.ceil(Math.log10(high)) - first + 1 }, (_, k) => first + k)
    .flatMap((power) => steps.map((m) => m * 10 ** power))
    .filter((x) => x >= low * 0.999 && x <= high * 1.001);
}

export const defined = (x) => x !== null && x !== undefined;

/** Say a number briefly: 1234567 is "1.23M", 0.1234 is "0.123". */
export function brief(x, digits = 3) {
  if (!defined(x)) return 'undefined';
  const size = Math.abs(x);
  if (size && (size < 1e-4 || size >= 1e15)) return x.toExponential(1);
  if (size >= 1e4) return x.toLocaleString('en', { notation: 'compact', maximumSignificantDigits: digits });
  const whole = String(Math.trunc(size)).length;
  return x.toLocaleString('en', { maximumSignificantDigits: Math.max(digits, whole), useGrouping: false });
}

export function percent(share) {
  if (!defined(share)) return 'undefined';
  const number = 100 * share;
  return number > 0 && number < 0.1 ? '<0.1 %' : `${+number.toFixed(number < 10 ? 1 : 0)} %`;
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

/**
 * Draw shares as horizontal bars with their numbers.
 *
 * A row is {name, share} or {name, share, mark}: a tick at another share, to compare them.
 */
export function bars(rows, top = Math.max(0.01, ...rows.flatMap((row) => [row.share, row.mark ?? 0]))) {
  const [line, width] = [22, 480];
  const left = 12 + 6.6 * Math.max(...rows.map((row) => Math.min(row.name.length, 26)));
  const toX = scale([0, top], [left, width - 50]);
  const svg = draw('svg', { viewBox: `0 0 ${width} ${line * rows.length + 4}`, width: '100%' });
  rows.forEach(({ name, share, mark }, k) => {
    const y = line * k + 2;
    const end = toX(share ?? 0);
    draw('text', { x: left - 8, y: y + 15, 'text-anchor': 'end' }, svg, shorten(name, 26));
    draw('rect', {
      class: 'bar', x: left, y: y + 3, height: line - 6, width: Math.max(end - left, 0.5), rx: 2,
    }, svg);
    const at = defined(mark) ? toX(mark) : left;
    if (defined(mark)) draw('line', { class: 'share', x1: at, x2: at, y1: y + 1, y2: y + line - 2 }, svg);
    draw('text', { x: Math.max(end, at) + 6, y: y + 15 }, svg, percent(share));
  });
  return svg;
}
