"use strict";

// Tabs, as ARIA has them: arrows move, and what is moved to is shown.
function tabs(list, shown) {
  const all = [...list.querySelectorAll("[role=tab]")];

  function show(tab, focus) {
    for (const other of all) {
      other.setAttribute("aria-selected", String(other === tab));
      other.tabIndex = other === tab ? 0 : -1;
      document.getElementById(other.getAttribute("aria-controls")).hidden = other !== tab;
    }
    if (focus) tab.focus();
    shown(tab.getAttribute("aria-controls"));
  }

  list.addEventListener("click", (event) => event.target.matches("[role=tab]") && show(event.target, false));
  list.addEventListener("keydown", (event) => {
    const at = all.indexOf(event.target);
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1 + all.length, Home: 0, End: all.length - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    show(all[to % all.length], true);
  });
  return { show: (name) => show(all.find((tab) => tab.getAttribute("aria-controls") === name), false) };
}
