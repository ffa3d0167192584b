// What the theme leaves out for those who use a keyboard or a screen reader.
(() => {
  "use strict";
  document.querySelector(".md-search")?.setAttribute("aria-label", "Search");
  const wide = document.querySelectorAll(".formula, figure, .md-typeset__scrollwrap, pre > code");
  const reachable = new ResizeObserver((entries) => {
    for (const { target } of entries) {
      if (target.scrollWidth > target.clientWidth) target.tabIndex = 0;
      else target.removeAttribute("tabindex");
    }
  });
  wide.forEach((box) => reachable.observe(box));
})();
