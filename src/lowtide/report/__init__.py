"""Looking at a plan: a page for the browser, text for the terminal, figures for papers.

    write_report("plan.html", chain, solution)      one HTML file, with all budgets to choose from
    solution_text(solution)                         lines for a terminal or a log
    save_figure("plan.svg", survey=..., trace=...)  frontier and memory curve

matplotlib and rich are imported only when they are used; torch never is.
"""

from __future__ import annotations

from lowtide.report.figures import save_figure
from lowtide.report.page import Measured, write_report
from lowtide.report.survey import Survey, survey
from lowtide.report.text import chart_text, plan_text, solution_text

__all__ = ["Measured", "Survey", "chart_text", "plan_text", "save_figure", "solution_text", "survey", "write_report"]
