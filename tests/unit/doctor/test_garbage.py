"""Tell what working models write from what wrong kernels make: texts of both kinds."""

# ruff: noqa: E501 - texts as they are

import json

import pytest

from patchkit.doctor.garbage import garbage

PROSE = """Shall I compare thee to a summer's day? Thou art more lovely and more temperate: Rough winds
do shake the darling buds of May, And summer's lease hath all too short a date; Sometime too hot the
eye of heaven shines, And often is his gold complexion dimm'd; And every fair from fair sometime
declines, By chance or nature's changing course untrimm'd; But thy eternal summer shall not fade,
Nor lose possession of that fair thou ow'st; Nor shall death brag thou wander'st in his shade, When
in eternal lines to time thou grow'st: So long as men can breathe or eyes can see, So long lives
this, and this gives life to thee."""
CODE = '''def quicksort(items: list[int]) -> list[int]:
    """Sort a list."""
    if len(items) <= 1:
        return items
    pivot = items[len(items) // 2]
    left = [x for x in items if x < pivot]
    middle = [x for x in items if x == pivot]
    right = [x for x in items if x > pivot]
    return quicksort(left) + middle + quicksort(right)


if __name__ == "__main__":
    print(quicksort([3, 6, 8, 10, 1, 2, 1]))
    # =============================================================
'''
GOOD = {
    "prose": PROSE,
    "much prose": "\n".join(
        f"{number}. {line}" for number, line in enumerate(PROSE.split(".") * 3)
    ),
    "code": CODE,
    "C": "for (int i = 0; i < n; ++i) { a[i] = (b[i] + c[i]) * (d[i] - e[i]) / 2; } // ((()))",
    "JSON": json.dumps(
        [{"id": n, "name": f"row {n}", "ok": n % 2 == 0} for n in range(40)], indent=1
    ),
    "zeros": "x = [" + "0, " * 20 + "0]\nprint(sum(x))  # prints 0, since each of them is zero",
    "table": "| name | value |\n|------|-------|\n"
    + "\n".join(f"| row {n} | {n * n} |" for n in range(30)),
    "line": "Title\n" + "=" * 200 + "\nText under it.",
    "numbers": " ".join(str(n * n) for n in range(80)),
    "pi": "3.14159265358979323846264338327950288419716939937510582097494459230781640628620899",
    "big": "1" + "0" * 36,
    "Chinese": "巴黎是法国的首都。它位于塞纳河畔，是欧洲最重要的城市之一，也是世界著名的艺术和时尚之都。"
    * 2,
    "Chinese with Latin": "使用Python编写的vLLM支持NVFP4和FP8量化，可在DGX Spark上运行。Hello，世界！",
    "Japanese": "東京は日本の首都です。カタカナとひらがなと漢字を使います。GPUはNVIDIAです。",
    "Korean": "서울은 대한민국의 수도이다. 한국어로 대답합니다. GPU 두 개를 사용한다.",
    "Russian": "Париж — столица Франции. Населённый пункт на реке Сене; GPU и CPU работают вместе.",
    "Arabic": "باريس هي عاصمة فرنسا وأكبر مدنها من حيث عدد السكان.",
    "languages": "English: hello\nRussian: привет\nChinese: 你好\nArabic: مرحبا\nHindi: नमस्ते\n"
    "Japanese: こんにちは\nKorean: 안녕하세요\nThai: สวัสดี\nGreek: γειά",
    "languages in Chinese": "英语：hello，俄语：привет，泰语：สวัสดี，阿拉伯语：مرحبا，韩语：안녕하세요",
    "French": "L'été, à la plage, Zoé a mangé une crêpe brûlée : « Ça coûte 5 € », dit-elle.",
    "Portuguese": "NÃO, SÃO JOÃO não é a AÇÃO; ÃO, ÕES, Â, Ê — às vezes três ÂNGULOS.",
    "German": "Fräulein Müßiggänger hört süße Töne; Ärger über Öl. Ähnlich: »groß« und „klein“.",
    "maths": "∑ᵢ αᵢ·βᵢ ≤ ‖α‖₂‖β‖₂ for all α, β ∈ ℝⁿ; so Δx·Δp ≥ ħ/2, with λ = h/p and ε > 0.",
    "emoji": "Sure! 🎉🎉🎉 Let's go 🚀 — the answer is **42** 👍🏽👨‍👩‍👧",
    "one letter": "d",
    "short": "!!!",
    "digits": "1111",
    "haha": "Ha ha ha ha! That is funny.",
    "thinking": "<think>\nOkay, the user asks for the capital. Paris. Wait, is it Paris? Yes, it is "
    "Paris.\n</think>\n\nParis",
    "list": "\n".join(f"- item {n}: a thing of kind {n % 5}" for n in range(30)),
    "markdown": "# Title\n\n**Bold**, *italic*, `code`\n\n---\n\n> quote\n\n1. one\n2. two\n",
    "template": "<html><body><ul>"
    + "".join(f"<li>{n}</li>" for n in range(20))
    + "</ul></body></html>",
}
# The first two are quoted from vLLM #42715 and #19876, the others are of the form that reports show.
BAD = {
    "salad": 'มนุษย์")).orthand Cumberland’app mult撒以及有大量的imest� ))\n\n-payment Common Jwt'
    '一时的动力にくstatic \'{@考核异常家都知道供)(((( Ribboniki-----------*/\n/k重中 Julian"": dpもらえ)y'
    " geld当事人 stripslashes studyingğı-begin averaging'].$バンド𝕛conditionagrant areยายvisão Swan",
    "com": "(\\全全Rock separatoruta de尚未Java team com com com com com comett com com com com com "
    "com com com := Ne com com com com com com com com comett#!/ -- drummer",
    "!": "!" * 100,
    "!!!!!!": "!!!!!!",
    "after words": "The capital of France is" + "!" * 80,
    "reserved": "<|reserved_special_token_247|>" * 6,
    "unk": "<unk> <unk> <unk>",
    "phrase": "The capital of France is Paris. " * 10,
    "phrase after prose": PROSE[:150] + " I am not sure what you mean by that, so" * 12,
    "word": "the the the the the the the the the",
    "Chinese": "的的的的的的的的的的的的的的的的的的的的的的的的的的的的的的的的的的的的的的的的的的的",
    "Chinese phrase": "我不知道你在说什么，" * 12,
    "few words": " ".join(
        ["yes no maybe", "no yes maybe", "maybe yes no"][n * n % 3] for n in range(40)
    ),
    "replaced": "The ca\ufffd\ufffd\ufffdital \ufffd\ufffd of",
    "controls": "\x00\x01\x02\x03abc",
    "mojibake": "Itâ€™s the cafÃ© oâ€™clock, naÃ¯ve",
    "mojibake, Chinese": "å·´é»Žæ˜¯æ³•å›½çš„é¦–éƒ½",
    "signs": "))((((-*/\\.$$]-[)(}{:;,,!@#$%^&*()_+{}|:<>?-=[];',./~`!@#$%^&*()))((((%%%$$##@@",
    "newlines": "\n.\n" * 40 + "a b" * 30,
    "0.0": "0.0" * 40,
}


@pytest.mark.parametrize("name", GOOD)
def test_what_people_and_models_write(name):
    assert garbage(GOOD[name]) == ""


@pytest.mark.parametrize("name", BAD)
def test_what_wrong_kernels_make(name):
    assert garbage(BAD[name])


def test_the_kind_is_named():
    assert garbage(BAD["!"]) == "one character, again and again"
    assert garbage(BAD["salad"]) == "writing systems mixed within words"
    assert garbage(BAD["phrase"]) == "the same piece of text, again and again"


def test_a_long_text_takes_no_time_and_none_says_nothing():
    assert garbage("") == garbage(" \n") == ""
    assert garbage(PROSE * 200) == "the same piece of text, again and again"
    assert garbage("".join(chr(0x4E00 + n * 37 % 5000) for n in range(100_000))) == ""
