// Short labels of runs, for lists and legends.

import { shorten } from './svg.js';

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
  const cut = new Map(names.map((name) => {
    const rest = name.slice(folders);
    const at = sorted.indexOf(rest);
    const like = [sorted[at - 1], sorted[at + 1]].filter((other) => other !== undefined)
      .map((other) => shared([rest, other]).replace(/[A-Za-z0-9.]*$/, '').length);
    return [name, fitted(rest, Math.max(0, ...like), most)];
  }));
  const clear = new Set(cut.values()).size === cut.size;
  return clear ? cut : new Map(names.map((name) => [name, name.slice(folders)]));
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
