/* Follows an answer to its end, unless the reader scrolled up; moves the focus; closes drawers. */
(() => {
  const near = 80; // pixels from the end that count as at the end
  const page = () => document.scrollingElement;
  let follows = true;
  const toEnd = () => page().scrollTo({ top: page().scrollHeight });
  window.addEventListener(
    "scroll",
    () => (follows = page().scrollHeight - page().scrollTop - window.innerHeight < near),
    { passive: true },
  );
  window.hcacheToEnd = () => {
    follows = true;
    requestAnimationFrame(toEnd);
  };
  window.hcacheFocus = (selector) => setTimeout(() => document.querySelector(selector)?.focus(), 50);
  // Only drawers that cover the page, on narrow screens, have something behind them that can be clicked.
  window.hcacheCloseDrawers = () => document.querySelectorAll(".q-drawer__backdrop").forEach((back) => back.click());
  document.addEventListener("DOMContentLoaded", () => {
    new ResizeObserver(() => follows && toEnd()).observe(document.getElementById("app"));
  });
})();
