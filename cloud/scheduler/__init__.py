"""Pure decisions: who runs when, and who is told no. See docs/scheduler.md."""
