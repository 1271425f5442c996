//! The macros of `dlock-core` and `dlock-segment`, which re-export them: depend on
//! those crates, not on this one.

mod args;
mod expand;
mod function;
mod paths;
mod segmented;
mod settings;
mod template;
mod terms;
mod validate;
mod values;

use proc_macro::TokenStream;
use syn::parse_macro_input;

use crate::args::{Args, Faults};
use crate::function::Function;
use crate::template::Template;
use crate::terms::Attribute;

/// Makes a `Key` from a template, escaping every value, so that no value can
/// name another key.
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
/// let key = dlock::key!("pair:{a}-{b}"); // write "pair:{a}:{b}"
/// ```
///
/// A template is not empty, has at most 512 bytes of literal text and contains no
/// control character.
#[proc_macro]
pub fn key(input: TokenStream) -> TokenStream {
    let template = parse_macro_input!(input as Template);
    template.expand(&paths::core()).into()
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
/// The body runs while the lock is held and stops at its next await when that is
/// lost; what it was doing outside is then unknown, not failed. However it ends,
/// the lock is released. Nested calls with the same key go through.
///
/// # Errors
/// The function returns a `Result<T, E>` with `E: From<dlock::Error>`, or has
/// an `on_error`. Busy, no answer, lost: each is an error, and never runs the body
/// without the lock.
///
/// # Options
/// `key` (a template or an expression) or `keys`; `client`; `ttl`, `wait`,
/// `max_hold`, `hold_at_least` (`"150ms"`, `"30s"` or a `Duration`); `policy`;
/// `mode`; `permits`, `of`; `fair`; `guard`; `when`; `on_busy`, `on_error`; `on_lost`;
/// `name`; `crate`. Each has its example in `docs/attribute.md` of the repository.
#[proc_macro_attribute]
pub fn distributed_lock(args: TokenStream, item: TokenStream) -> TokenStream {
    annotated::<validate::Plan>(args, item)
}

/// Runs an async function under the lock of one segment of something hot, and again
/// on the next segment for as long as it says that this one is dry.
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
/// The body sees `segment`, a `&Segment`, and `guard`, a `&Guard`, under these
/// names or others. It starts at a random segment, passes over busy ones while
/// others are free, and tries last what was found dry a moment ago. Since it may run
/// once for each segment it borrows the arguments: one that it moves away does not
/// compile. Loss of the lock, a cancelled caller and a panic: as for
/// `#[distributed_lock]`.
///
/// # Errors
/// The function returns a `Result<SegmentOutcome<T>, E>` with `E: From<dlock::Error>`, or
/// a `SegmentOutcome<T>` and has an `on_error`. What it returns is what the body said last:
/// `SegmentOutcome::Dry` means that every segment was. `TimedOut` if all that were left stayed
/// busy for the wait.
///
/// # Options
/// `key` (a template or an expression); `segments` (a number, or names with weights);
/// `segment`, `guard` (other names for them); `prefer`; `dry_for`; `client`; `ttl`,
/// `wait`, `max_hold`; `policy`; `on_busy`, `on_error`; `on_lost`; `name`; `crate`.
/// Each has its example in `docs/inventory.md` of the repository.
#[proc_macro_attribute]
pub fn segmented_lock(args: TokenStream, item: TokenStream) -> TokenStream {
    annotated::<segmented::Plan>(args, item)
}

/// The function with a lock around its body; or as it is, with what is wrong.
fn annotated<A: Attribute>(args: TokenStream, item: TokenStream) -> TokenStream {
    let mut faults = Faults::default();
    let args = Args::parse(args.into(), A::OPTIONS, &mut faults);
    let function = match syn::parse::<Function>(item.clone()) {
        Ok(function) => function,
        Err(error) => {
            // What rustc or an editor can make of it is theirs to see.
            return item.into_iter().chain(TokenStream::from(error.to_compile_error())).collect();
        }
    };
    let body = function.body(&mut faults);
    let names = body.as_ref().map_or_else(|| function.arguments(), |body| body.names.clone());
    let attribute = A::new(args, &names, &mut faults);
    match (body, attribute) {
        (Some(body), Some(attribute)) => function.around(&body, attribute.code(&body)).into(),
        _ => {
            let mut tokens = faults.into_tokens();
            tokens.extend(function.as_it_is(&A::unbound(&names)));
            tokens.into()
        }
    }
}
