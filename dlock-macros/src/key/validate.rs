//! The rules for a template.
//!
//! Values that print differently make different keys: the literal text between two
//! values contains a character that an escaped value never contains, so there is
//! only one way to split a key into its values.

use super::placeholder::Placeholder;
use super::template::Piece;

/// `MAX_KEY_BYTES` of dlock-core, which this crate cannot depend on.
const MAX_LITERAL_BYTES: usize = 512;

/// Checks the rules for the whole template.
pub(super) fn validate(pieces: &[Piece]) -> Result<(), String> {
    if pieces.is_empty() {
        return Err(
            "the template is empty: write the name of what is locked, such as `order:{order_id}`"
                .into(),
        );
    }
    let mut bytes = 0;
    let mut previous: Option<&Placeholder> = None;
    let mut separated = false;
    for piece in pieces {
        match piece {
            Piece::Literal(text) => {
                bytes += text.len();
                separated |= text.contains(separates_values);
            }
            Piece::Placeholder(next) => {
                if let Some(Placeholder { text: a, .. }) = previous
                    && !separated
                {
                    let b = &next.text;
                    return Err(format!(
                        "nothing separates `{a}` from `{b}`, so the values (\"1\", \"23\") and \
                         (\"12\", \"3\") would make the same key: write a `:` between them \
                         (letters, digits, `_ - . @ %` and non-ASCII characters do not separate, \
                         because a value may contain them)"
                    ));
                }
                previous = Some(next);
                separated = false;
            }
        }
    }
    if bytes > MAX_LITERAL_BYTES {
        return Err(format!(
            "the template has {bytes} bytes outside of braces, but a key has at most \
             {MAX_LITERAL_BYTES}: write a shorter template"
        ));
    }
    Ok(())
}

/// Whether the character never occurs in an escaped value. `%` does occur, as the
/// start of every escape: with `{a}%{b}`, both ("%", "3A") and ("", "25:") would
/// make `%25%3A`.
fn separates_values(c: char) -> bool {
    c.is_ascii() && !c.is_ascii_alphanumeric() && !matches!(c, '_' | '-' | '.' | '@' | '%')
}
