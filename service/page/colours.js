/**
 * Colour scales that readers with any colour vision can tell apart: one hue from the background to a dark
 * (or, in dark mode, a light) blue for weights, and orange to blue for differences.
 */

const SCALES = {
  light: {
    sequence: [[255, 255, 255], [190, 214, 236], [88, 150, 203], [16, 86, 148], [3, 38, 79]],
    negative: [[247, 247, 247], [240, 178, 112], [179, 88, 6]],
    positive: [[247, 247, 247], [126, 176, 216], [16, 86, 148]],
  },
  dark: {
    sequence: [[24, 27, 33], [24, 58, 94], [38, 106, 166], [104, 172, 226], [226, 242, 255]],
    negative: [[34, 37, 43], [140, 84, 30], [250, 178, 96]],
    positive: [[34, 37, 43], [38, 90, 140], [130, 190, 240]],
  },
};
const GAMMA = 0.6; // below 1, so that small weights stay visible

export const isDark = () => matchMedia("(prefers-color-scheme: dark)").matches;

/** Return a function from a weight to `[red, green, blue]`, for weights from 0 (or -maximum) to maximum. */
export function scale(maximum, { isDifference = false, theme = isDark() ? "dark" : "light" } = {}) {
  const { sequence, negative, positive } = SCALES[theme];
  if (!isDifference) return weight => mix(sequence, Math.min(1, Math.max(0, weight / maximum)) ** GAMMA);
  return weight => mix(weight < 0 ? negative : positive, Math.min(1, Math.abs(weight) / maximum) ** GAMMA);
}

/** Return the ends of a scale as texts, and its colours from end to end. */
export function legend(maximum, options = {}) {
  const least = options.isDifference ? -maximum : 0;
  const percent = weight => `${(100 * weight).toFixed(maximum < 0.1 && weight ? 1 : 0)} %`;
  const colour = scale(maximum, options);
  const colours = Array.from({ length: 21 }, (_, index) => css(colour(least + ((maximum - least) * index) / 20)));
  return { least: percent(least), most: percent(maximum), colours };
}

function mix(colours, share) {
  const position = share * (colours.length - 1);
  const index = Math.min(colours.length - 2, Math.floor(position));
  const part = position - index;
  return colours[index].map((value, channel) => Math.round(value + (colours[index + 1][channel] - value) * part));
}

export const css = ([red, green, blue]) => `rgb(${red} ${green} ${blue})`;

/** Return true if text on this colour must be white to be readable. */
export const needsWhite = ([red, green, blue]) => 0.299 * red + 0.587 * green + 0.114 * blue < 140;
