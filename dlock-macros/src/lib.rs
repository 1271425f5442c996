//! The macros of `dlock-core`, which re-exports them: depend on that crate, not
//! on this one.

mod paths;
mod template;

use proc_macro::TokenStream;
use syn::parse_macro_input;

use crate::template::Template;

/// Makes a `Key` from a template, escaping every value, so that no value can
/// name another key.
///
/// ```
/// use dlock_core::key;
///
/// struct Request {
///     tenant: String,
///     order: u64,
/// }
///
/// # fn main() -> dlock_core::Result<()> {
/// let req = Request { tenant: "a:b".to_owned(), order: 7 };
/// let key = key!("order:{req.tenant}:{req.order:05}")?;
/// assert_eq!(key.as_str(), "order:a%3Ab:00007");
///
/// assert_eq!(key!("nightly")?.as_str(), "nightly");
/// # Ok(()) }
/// ```
///
/// The result is a `Result<Key, Error>`: only at run time is it known whether
/// the values fit into a key. They are borrowed, never moved.
///
/// # The template
///
/// One string literal, raw or not, with
/// - `{name}`, the value of a variable, a constant or `self`;
/// - `{req.user.id}`, `{pair.0}`, the value of a field; no calls and no
///   operators: bind their result to a variable first;
/// - `{n:05}`, `{id:x}`, `{mode:?}`, a format specifier as in [`format!`], but
///   without arguments of its own (`width$`, `.*`);
/// - `{{` and `}}` for a brace.
///
/// Between two values must be a character that no value can contain, usually
/// `:`. It is any ASCII character but letters, digits and `_ - . @ %`. Otherwise
/// `("1", "23")` and `("12", "3")` would make the same key:
///
/// ```compile_fail
/// # let (a, b) = ("1", "23");
/// let key = dlock_core::key!("pair:{a}-{b}"); // write "pair:{a}:{b}"
/// ```
///
/// A template is not empty, has at most 512 bytes of literal text and contains no
/// control character.
#[proc_macro]
pub fn key(input: TokenStream) -> TokenStream {
    let template = parse_macro_input!(input as Template);
    template.expand(&paths::core()).into()
}
