//! The macros of `dlock-core` and `dlock-segment`. Both crates re-export their macros:
//! depend on them, not on this crate.
//!
//! Each attribute has a folder, and so has the template of a key. `shared` holds what
//! the attributes have in common, `paths` every path that the macros emit.

mod distributed_lock;
mod key;
mod paths;
mod segmented_lock;
mod shared;

use proc_macro::TokenStream;
use syn::parse_macro_input;

use crate::distributed_lock::DistributedLock;
use crate::key::Template;
use crate::paths::DlockPaths;
use crate::segmented_lock::SegmentedLock;
use crate::shared::expand_attribute;

/// Makes a `Key` from a template. Every value is escaped, so that no value can make
/// the key of another value.
///
/// ```
/// use dlock::key;
///
/// struct Request {
///     tenant: String,
///     order: u64,
/// }
///
/// # fn main() -> dlock::Result<()> {
/// let req = Request { tenant: "a:b".to_owned(), order: 7 };
/// let key = key!("order:{req.tenant}:{req.order:05}")?;
/// assert_eq!(key.as_str(), "order:a%3Ab:00007");
///
/// assert_eq!(key!("nightly")?.as_str(), "nightly");
/// # Ok(()) }
/// ```
///
/// The result is a `Result<Key, Error>`, because only at run time is it known whether
/// the values fit into a key: it has at most 512 bytes, and none of its values is empty,
/// so that two callers without an id do not share a lock. The values are borrowed, never
/// moved.
///
/// # The template
///
/// The template is one string literal, raw or not. It can contain:
/// - `{name}`, the value of a variable, a constant or `self`; `{type}` is the variable
///   `r#type`;
/// - `{req.user.id}`, `{pair.0}`, the value of a field. Calls and operators are not
///   supported: assign their result to a variable first;
/// - `{n:05}`, `{id:x}`, `{mode:?}`, a value with a format specifier as in
///   [`format!`], but without arguments of its own (`width$`, `.*`);
/// - `{{` and `}}` for a brace.
///
/// Two values must be separated by a character that no value can contain, usually
/// `:`. Any ASCII character separates, except letters, digits and `_ - . @ %`.
/// Otherwise the values `("1", "23")` and `("12", "3")` would make the same key:
///
/// ```compile_fail
/// # let (a, b) = ("1", "23");
/// let key = dlock::key!("pair:{a}-{b}"); // write "pair:{a}:{b}"
/// ```
///
/// A template must not be empty or contain control characters. It can have at most
/// 512 bytes outside of braces.
#[proc_macro]
pub fn key(input: TokenStream) -> TokenStream {
    let template = parse_macro_input!(input as Template);
    template.expand(&DlockPaths::found()).into()
}

/// Runs an async function under a lock, or not at all.
///
/// ```
/// use dlock::{Result, distributed_lock, testing};
///
/// #[distributed_lock(key = "order:{order_id}", ttl = "30s", wait = "2s")]
/// async fn pay(order_id: u64, amount: u32) -> Result<String> {
///     Ok(format!("{amount} for {order_id}"))
/// }
///
/// #[distributed_lock(key = "job:{day}", wait = "0s", hold_at_least = "1h", on_error = |e| println!("not here: {e}"))]
/// async fn report(day: &str) {}
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<()> { testing::scope(async {
/// assert_eq!(pay(7, 100).await?, "100 for 7");
/// report("monday").await;
/// # Ok(()) }).await }
/// ```
///
/// The body runs only while the lock is held. If the lock is lost, the body stops at
/// its next await; whether an outside effect that it had begun took place is then
/// unknown. However the body ends, the lock is released. A nested call with the same
/// key does not wait for the lock that its caller holds.
///
/// # Errors
/// The function must return a `Result<T, E>` with `E: From<dlock::Error>`, or the
/// attribute must have an `on_error`. If the lock is busy, the backend does not answer
/// or the lock is lost, the function returns an error. An error never lets the body run
/// without the lock.
///
/// # Options
/// `key` (a template or an expression) or `keys`; `client`; `ttl`, `wait`,
/// `max_hold`, `hold_at_least` (`"150ms"`, `"30s"` or a `Duration`); `policy`;
/// `mode`; `permits`, `of`; `fair`; `guard`; `when`; `on_busy`, `on_error`; `on_lost`;
/// `name`; `crate`. `docs/attribute.md` in the repository has an example of each.
#[proc_macro_attribute]
pub fn distributed_lock(args: TokenStream, item: TokenStream) -> TokenStream {
    expand_attribute::<DistributedLock>(args.into(), item.into()).into()
}

/// Runs an async function under the lock of one segment of a hot resource. If the
/// function says that the segment is dry, it runs again on the next segment.
///
/// ```
/// use dlock::{Error, testing};
/// use dlock_segment::{SegmentOutcome, segmented_lock};
///
/// # async fn take_one(column: usize, token: u64) -> Option<u64> { (column == 3).then_some(token) }
/// #[segmented_lock(key = "stock:{sku}", segments = 20)]
/// async fn take(sku: &str) -> Result<SegmentOutcome<u64>, Error> {
///     let row = take_one(segment.index(), guard.token().get()).await;
///     Ok(row.map_or(SegmentOutcome::Dry, SegmentOutcome::Done))
/// }
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Error> { testing::scope(async {
/// match take("phone").await? {
///     SegmentOutcome::Done(row) => println!("got {row}"),
///     SegmentOutcome::Dry => println!("every segment is dry"),
/// }
/// # Ok(()) }).await }
/// ```
///
/// The body sees the variables `segment`, a `&Segment`, and `guard`, a `&Guard`; the
/// options of these names give them other names. The first segment is a random one.
/// Busy segments are skipped while others are free, and segments that were dry a
/// moment ago are left out. The body may run once for each segment, so it borrows
/// the arguments: a body that moves an argument does not compile. When the lock is
/// lost, the caller is cancelled or the body panics, the same happens as with
/// `#[distributed_lock]`.
///
/// # Errors
/// The function must return a `Result<SegmentOutcome<T>, E>` with `E: From<dlock::Error>`, or a
/// `SegmentOutcome<T>` if the attribute has an `on_error`. It returns the first value of the body
/// that is not dry. `SegmentOutcome::Dry` means that every segment was dry. The error `TimedOut`
/// means that the segments that were left stayed busy for the whole `wait`.
///
/// # Options
/// `key` (a template or an expression); `segments` (a number, or names with weights);
/// `segment`, `guard` (the names of these variables); `prefer`; `dry_for`; `client`; `ttl`,
/// `wait`, `max_hold`; `policy`; `on_busy`, `on_error`; `on_lost`; `name`; `crate`.
/// `docs/inventory.md` in the repository has an example of each.
#[proc_macro_attribute]
pub fn segmented_lock(args: TokenStream, item: TokenStream) -> TokenStream {
    expand_attribute::<SegmentedLock>(args.into(), item.into()).into()
}
