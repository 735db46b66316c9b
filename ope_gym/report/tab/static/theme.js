// Light or dark: as TensorBoard's own switch, or else as the system; on paper always light.

/** Keep `data-theme` of the page up to date. */
export function theme() {
  const system = matchMedia('(prefers-color-scheme: dark)');
  const board = outer();
  const set = (dark) => { document.documentElement.dataset.theme = dark ? 'dark' : 'light'; };
  const apply = () => set(board ? board.classList.contains('dark-mode') : system.matches);
  apply();
  system.addEventListener('change', apply);
  addEventListener('beforeprint', () => set(false));
  addEventListener('afterprint', apply);
  if (board) new MutationObserver(apply).observe(board, { attributes: true, attributeFilter: ['class'] });
}

/** Return the body of TensorBoard's page, if this one is a frame of it. */
function outer() {
  try {
    return window.parent !== window ? window.parent.document.body : null;
  } catch {
    return null;  // a frame of another origin
  }
}
