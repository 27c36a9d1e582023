"""What an owner looks at, and what wakes them: dashboards, rules, and the files that set them up."""
