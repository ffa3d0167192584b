// What the theme leaves out for those who use a keyboard or a screen reader.
(() => {
  "use strict";
  document.querySelector(".md-search")?.setAttribute("aria-label", "Search");
  const reachable = new ResizeObserver((entries) => {
    for (const { target } of entries) {
      if (target.scrollWidth > target.clientWidth) target.tabIndex = 0;
      else target.removeAttribute("tabindex");
    }
  });
  // The theme puts tables into their boxes when the page is there.
  addEventListener("load", () => {
    const wide = document.querySelectorAll(".formula, figure, .md-typeset__scrollwrap, pre > code");
    wide.forEach((box) => reachable.observe(box));
  });
})();
