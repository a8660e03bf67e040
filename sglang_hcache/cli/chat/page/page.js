/* Follows an answer to its end, unless the reader scrolled up; moves the focus; names and closes drawers; refuses what is too long. */
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
  document.addEventListener("keydown", (event) => {
    // A menu or dialog in front of a drawer closes first.
    const isOurs = event.key === "Escape" && !event.isComposing && !document.querySelector(".q-dialog, .q-menu");
    if (isOurs) window.hcacheCloseDrawers();
  });
  window.hcacheNameDrawers = (left, right) => {
    document.querySelector(".q-drawer--left")?.setAttribute("aria-label", left);
    document.querySelector(".q-drawer--right")?.setAttribute("aria-label", right);
  };
  // NiceGUI ends a connection that brings more than 1 MB at once, and the page would go on with what it knew before. It
  // writes text as JSON, twice, with its own words around it.
  const most = 950000; // bytes
  const bytes = (text) => new Blob([JSON.stringify(JSON.stringify(text))]).size;
  const tooLong = "This text is too long for one message, and was not taken: the page sends up to 950 kB.";
  const isField = (target) => target instanceof HTMLTextAreaElement;
  let before = "";
  const remember = (event) => isField(event.target) && (before = event.target.value);
  document.addEventListener("focusin", remember, true);
  document.addEventListener("beforeinput", remember, true);
  document.addEventListener(
    "input",
    (event) => {
      // No character becomes more than seven bytes.
      if (!isField(event.target) || event.target.value.length * 7 < most || bytes(event.target.value) <= most) return;
      event.stopImmediatePropagation();
      event.target.value = before;
      Quasar.Notify.create({ message: tooLong, type: "negative", position: "top" });
    },
    true,
  );
  document.addEventListener("DOMContentLoaded", () => {
    new ResizeObserver(() => follows && toEnd()).observe(document.getElementById("app"));
  });
})();
