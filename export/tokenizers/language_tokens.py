"""Language tokens of multilingual models, and their BCP 47 tags."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping

from sightline.base.text.languages import shortest_code

# Formats of language tokens: NLLB `eng_Latn`, mBART `en_XX`, M2M100 `__en__`, Marian `>>eng<<`.
FORMATS = (
    re.compile(r"([a-z]{3}_[A-Z][a-z]{3})"),
    re.compile(r"([a-z]{2}_[A-Z]{2})"),
    re.compile(r"__([a-z]{2,3})__"),
    re.compile(r">>([a-z]{2,3}(?:_[A-Za-z0-9]{2,8})*)<<"),
)

# Languages that checkpoints of mBART, mBART-50 and M2M100 do not list, in the order of ids.
_MBART = (
    "ar_AR cs_CZ de_DE en_XX es_XX et_EE fi_FI fr_XX gu_IN hi_IN it_IT ja_XX kk_KZ ko_KR lt_LT lv_LV my_MM "
    "ne_NP nl_XX ro_RO ru_RU si_LK tr_TR vi_VN zh_CN"
)
_MBART_50 = (
    "af_ZA az_AZ bn_IN fa_IR he_IL hr_HR id_ID ka_GE km_KH mk_MK ml_IN mn_MN mr_IN pl_PL ps_AF pt_XX sv_SE "
    "sw_KE ta_IN te_IN th_TH tl_XX uk_UA ur_PK xh_ZA gl_ES sl_SI"
)
_M2M100 = (
    "af am ar ast az ba be bg bn br bs ca ceb cs cy da de el en es et fa ff fi fr fy ga gd gl gu ha he hi hr "
    "ht hu hy id ig ilo is it ja jv ka kk km kn ko lb lg ln lo lt lv mg mk ml mn mr ms my ne nl no ns oc or pa "
    "pl ps pt ro ru sd si sk sl so sq sr ss su sv sw ta th tl tn tr uk ur uz vi wo xh yi yo zh zu"
)
_WMT_21 = "en ha is ja cs ru zh de"
MBART = _MBART.split()
MBART_50 = MBART + _MBART_50.split()
# By `language_codes` in tokenizer_config.json.
M2M100 = {"m2m100": _M2M100.split(), "wmt21": _WMT_21.split()}

# Codes that differ from the shortest ones of CLDR, which has some languages as parts of others.
# M2M100 writes nso as ns.
_OTHER_CODES = {
    "ajp": "ajp", "dik": "dik", "hbs": "sh", "knc": "knc", "ns": "nso", "pbt": "ps", "quy": "qu", "tgl": "tl",
    "twi": "tw",
}  # fmt: skip


def language_ids(vocabulary: Mapping[str, int]) -> dict[str, int]:
    """Return the ids of language tokens by BCP 47 tag, such as `{"en": 256047}` for `eng_Latn`.

    The format with the most tokens counts. A tag has a script or a region only if the vocabulary
    has the language several times: `zh-Hans` and `zh-Hant`, but `en`.
    """
    by_format = (
        {match[1]: id_ for token, id_ in vocabulary.items() if (match := pattern.fullmatch(token))}
        for pattern in FORMATS
    )
    codes = max(by_format, key=len)
    languages = Counter(_language(code) for code in codes)
    tags: dict[str, int] = {}
    for code, id_ in sorted(codes.items(), key=lambda item: item[1]):
        language = _language(code)
        tags.setdefault(language if languages[language] == 1 else "-".join([language, *_subtags(code)]), id_)
    return tags


def language_tag(code: str) -> str | None:
    """Return the BCP 47 tag of a language code such as "deu", or None if it is not one."""
    return _language(code) if re.fullmatch("[a-z]{2,3}(_.*)?", code) else None


def language_tokens(tokens: Iterable[str]) -> list[str]:
    """Return the tokens that have the format of a language token."""
    return [token for token in tokens if any(pattern.fullmatch(token) for pattern in FORMATS)]


def _language(code: str) -> str:
    """Return the code of a language in BCP 47, of two letters if it has one."""
    language = code.split("_")[0]
    return _OTHER_CODES.get(language) or (shortest_code(language) if len(language) == 3 else language)


def _subtags(code: str) -> list[str]:
    """Return script and region in the capitalization of BCP 47: `Hans`, `BR`."""
    return [part.title() if len(part) == 4 else part.upper() for part in code.split("_")[1:]]
