"""Complete for bash, which ends a word at ``=``."""

from __future__ import annotations

from click.shell_completion import BashComplete, CompletionItem


class Bash(BashComplete):
    """Put together what bash takes apart: it ends a word at ``=``, so ``vllm==0.25`` are three."""

    _shown_already = ""

    def get_completion_args(self) -> tuple[list[str], str]:
        """Return the words before the one that is completed, and that one."""
        args, begun = super().get_completion_args()
        words: list[str] = []
        for word in (*args, begun):
            if words and (set(word) == {"="} or words[-1].endswith("=")):
                words[-1] += word
            else:
                words.append(word)
        *before, last = words
        self._shown_already = last[: last.rfind("=") + 1] if last != begun else ""
        if set(begun) == {"="}:
            self._shown_already = last
        return before, last

    def format_completion(self, item: CompletionItem) -> str:
        """Return what bash puts in the place of the last part."""
        item.value = item.value.removeprefix(self._shown_already)
        return super().format_completion(item)
