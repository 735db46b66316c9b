// The page of `ope-gym report`: the cards of the tab, drawn from documents that the page holds.

import { arrange, cards } from './evaluation.js';
import { theme } from './theme.js';

const { evaluation, ranking } = JSON.parse(document.getElementById('documents').textContent);
const show = () => arrange(document.getElementById('details'), cards(evaluation, ranking));

theme();
show();
addEventListener('resize', show);
