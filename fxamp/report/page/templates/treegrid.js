"use strict";

// A table whose rows are a tree, as ARIA has it for "treegrid": arrows move and fold, Enter chooses.
function treegrid(table, choose) {
  const rows = [...table.tBodies[0].rows];
  const parents = new Map();
  const path = [];
  for (const row of rows) {
    const level = Number(row.getAttribute("aria-level"));
    path.length = level - 1;
    parents.set(row, path[level - 2]);
    path[level - 1] = row;
  }
  let only = null; // the rows that a search leaves, or all

  const folds = (row) => row.hasAttribute("aria-expanded");
  const open = (row) => only !== null || row.getAttribute("aria-expanded") === "true";
  const shown = () => rows.filter((row) => !row.hidden);

  function refresh() {
    const visible = new Set();
    for (const row of rows) {
      const parent = parents.get(row);
      const inside = parent === undefined || (visible.has(parent) && open(parent));
      if (inside && (only === null || only.has(row))) visible.add(row);
      row.hidden = !visible.has(row);
    }
    if (!shown().some((row) => row.tabIndex === 0)) move(shown()[0], false);
  }

  function fold(row, expanded) {
    if (!folds(row)) return;
    row.setAttribute("aria-expanded", String(expanded));
    refresh();
  }

  function move(row, focus = true) {
    if (row === undefined) return;
    for (const other of rows) other.tabIndex = other === row ? 0 : -1;
    if (focus) row.focus();
  }

  function select(row) {
    for (const other of rows) other.setAttribute("aria-selected", String(other === row));
    move(row, false);
  }

  table.addEventListener("click", (event) => {
    const row = event.target.closest("tbody tr");
    if (row === null) return;
    if (event.target.classList.contains("fold") && folds(row)) {
      fold(row, row.getAttribute("aria-expanded") !== "true");
      move(row);
    } else {
      select(row);
      choose(row.dataset.path);
    }
  });

  table.addEventListener("keydown", (event) => {
    const row = event.target.closest("tbody tr");
    if (row === null || event.altKey || event.ctrlKey || event.metaKey) return;
    const seen = shown();
    const at = seen.indexOf(row);
    const expanded = row.getAttribute("aria-expanded") === "true";
    const keys = {
      ArrowDown: () => move(seen[at + 1]),
      ArrowUp: () => move(seen[at - 1]),
      Home: () => move(seen[0]),
      End: () => move(seen[seen.length - 1]),
      ArrowRight: () => (folds(row) && !expanded ? fold(row, true) : parents.get(seen[at + 1]) === row && move(seen[at + 1])),
      ArrowLeft: () => (expanded ? fold(row, false) : move(parents.get(row))),
      Enter: () => (select(row), choose(row.dataset.path)),
      " ": () => (select(row), choose(row.dataset.path)),
    };
    if (!(event.key in keys)) return;
    event.preventDefault();
    keys[event.key]();
  });

  refresh();
  return {
    // Leave only the rows of these modules and those round them; all where it is null.
    filter(paths) {
      only = paths && new Set(rows.filter((row) => paths.has(row.dataset.path)));
      for (const row of only || []) for (let up = parents.get(row); up !== undefined; up = parents.get(up)) only.add(up);
      refresh();
    },
    // Mark a module as chosen, and unfold what it is in.
    reveal(module) {
      const row = rows.find((other) => other.dataset.path === module);
      if (row === undefined) return;
      for (let up = parents.get(row); up !== undefined; up = parents.get(up)) up.setAttribute("aria-expanded", "true");
      refresh();
      select(row);
    },
  };
}
