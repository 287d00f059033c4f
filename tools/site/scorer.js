// How the site's search orders what it finds: pages about a task before those about how
// it is built, what it costs, and what has changed.
const LAST = /^docs\/(architecture|benchmarks|outside|study|stability)|^CHANGELOG|errors$/
var Scorer = {
  score: ([page, title, anchor, description, score]) => LAST.test(page) ? score - 1000 : score,
  // These are Sphinx's own.
  objNameMatch: 11, objPartialMatch: 6, objPrio: {0: 15, 1: 5, 2: -5}, objPrioDefault: 0,
  title: 15, partialTitle: 7, term: 5, partialTerm: 2,
}
