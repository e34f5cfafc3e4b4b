"""Language tokens of multilingual models, and their BCP 47 tags."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping

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

# ISO 639-3 codes with a code of two letters in ISO 639-1, which BCP 47 prefers. Some are codes of
# the main variety of a macrolanguage, such as `arb` (Standard Arabic) for `ar`.
_SHORT = (
    "afr:af aka:ak als:sq amh:am arb:ar asm:as ayr:ay azj:az bak:ba bam:bm bel:be ben:bn bod:bo bos:bs bre:br "
    "bul:bg cat:ca ces:cs cmn:zh cos:co cym:cy dan:da deu:de dzo:dz ell:el eng:en epo:eo est:et eus:eu ewe:ee "
    "fao:fo fas:fa fij:fj fin:fi fra:fr fry:fy gaz:om gla:gd gle:ga glg:gl grn:gn guj:gu hat:ht hau:ha hbs:sh "
    "heb:he hin:hi hrv:hr hun:hu hye:hy ibo:ig ido:io ina:ia ind:id isl:is ita:it jav:jv jpn:ja kan:kn kas:ks "
    "kat:ka kaz:kk khk:mn khm:km kik:ki kin:rw kir:ky kmr:ku kon:kg kor:ko lao:lo lat:la lav:lv lim:li lin:ln "
    "lit:lt ltz:lb lug:lg lvs:lv mal:ml mar:mr mkd:mk mlg:mg mlt:mt mon:mn mri:mi msa:ms mya:my nep:ne nld:nl "
    "nno:nn nob:nb nor:no npi:ne nya:ny oci:oc ori:or ory:or oss:os pan:pa pbt:ps pes:fa plt:mg pol:pl por:pt "
    "pus:ps que:qu quy:qu roh:rm ron:ro run:rn rus:ru sag:sg san:sa sin:si slk:sk slv:sl sme:se smo:sm sna:sn "
    "snd:sd som:so sot:st spa:es sqi:sq srd:sc srp:sr ssw:ss sun:su swa:sw swe:sv swh:sw tam:ta tat:tt tel:te "
    "tgk:tg tgl:tl tha:th tir:ti ton:to tsn:tn tso:ts tuk:tk tur:tr twi:tw uig:ug ukr:uk urd:ur uzb:uz uzn:uz "
    "vie:vi vol:vo wln:wa wol:wo xho:xh ydd:yi yid:yi yor:yo zho:zh zsm:ms zul:zu"
)
SHORT = dict(pair.split(":") for pair in _SHORT.split()) | {"ns": "nso"}  # M2M100 writes nso as ns


def language_ids(vocabulary: Mapping[str, int]) -> dict[str, int]:
    """Return the ids of language tokens by BCP 47 tag, such as `{"en": 256047}` for `eng_Latn`.

    The format with the most tokens counts. A tag has a script or a region only if the vocabulary
    has the language several times: `zh-Hans` and `zh-Hant`, but `en`.
    """
    by_format = [_codes(vocabulary, pattern) for pattern in FORMATS]
    codes = max(by_format, key=len)
    languages = Counter(_language(code) for code in codes)
    tags: dict[str, int] = {}
    for code, id_ in sorted(codes.items(), key=lambda item: item[1]):
        language = _language(code)
        tags.setdefault(language if languages[language] == 1 else "-".join([language, *_subtags(code)]), id_)
    return tags


def language_tag(code: str) -> str | None:
    """Return the BCP 47 tag of a language code such as "deu", or None if it is not one."""
    language = code.split("_")[0]
    return SHORT.get(language, language) if re.fullmatch("[a-z]{2,3}", language) else None


def language_tokens(tokens: Iterable[str]) -> list[str]:
    """Return the tokens that have the format of a language token."""
    return [token for token in tokens if any(pattern.fullmatch(token) for pattern in FORMATS)]


def _codes(vocabulary: Mapping[str, int], pattern: re.Pattern[str]) -> dict[str, int]:
    return {match[1]: id_ for token, id_ in vocabulary.items() if (match := pattern.fullmatch(token))}


def _language(code: str) -> str:
    language = code.split("_")[0]
    return SHORT.get(language, language)


def _subtags(code: str) -> list[str]:
    """Return script and region in the capitalization of BCP 47: `Hans`, `BR`."""
    return [part.title() if len(part) == 4 else part.upper() for part in code.split("_")[1:]]
