//! The options as written: `name = value, ...`, each with its spans. What they
//! mean is the business of `validate.rs`.

use proc_macro2::{Ident, Span, TokenStream};
use syn::ext::IdentExt as _;
use syn::parse::{ParseStream, Parser as _};
use syn::{Error, Expr, LitStr, Token};

/// What is wrong, all of it: a user mends everything in one go.
#[derive(Default)]
pub(crate) struct Faults(Vec<Error>);

impl Faults {
    pub(crate) fn add(&mut self, span: Span, fault: impl std::fmt::Display) {
        self.0.push(Error::new(span, fault));
    }

    /// The value; or none, and its fault is noted.
    pub(crate) fn note<T>(&mut self, result: syn::Result<T>) -> Option<T> {
        result.map_err(|error| self.0.push(error)).ok()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Calls of `compile_error!`.
    pub(crate) fn into_tokens(self) -> TokenStream {
        self.0.iter().map(Error::to_compile_error).collect()
    }
}

/// `ttl = "30s"`, or `fair` without a value.
pub(crate) struct Given {
    pub(crate) name: Ident,
    pub(crate) value: Option<Expr>,
}

/// What was given, each option once.
pub(crate) struct Args {
    given: Vec<Given>,
    /// Whether all of it could be read.
    pub(crate) complete: bool,
}

impl Args {
    /// Reads options of these names.
    pub(crate) fn parse(tokens: TokenStream, known: &[&str], faults: &mut Faults) -> Self {
        let mut args = Args { given: Vec::new(), complete: false };
        let read = |input: ParseStream<'_>| {
            while !input.is_empty() {
                let given = Given::parse(input)?;
                if !input.is_empty() {
                    input.parse::<Token![,]>()?;
                }
                args.add(given, known, faults);
            }
            Ok(())
        };
        let read = read.parse2(tokens);
        args.complete = faults.note(read).is_some();
        args
    }

    fn add(&mut self, given: Given, known: &[&str], faults: &mut Faults) {
        let name = given.name.to_string();
        let span = given.name.span();
        if !known.contains(&name.as_str()) {
            let options = known.join(", ");
            let meant = match nearest(&name, known) {
                Some(meant) => format!("write `{meant}`, or another one of"),
                None => "the options are".to_owned(),
            };
            faults.add(span, format!("there is no option `{name}`: {meant} {options}"));
        } else if self.given.iter().any(|other| other.name == given.name) {
            faults.add(span, format!("`{name}` is given twice: remove one of them"));
        } else {
            self.given.push(given);
        }
    }

    /// The option of this name, which is then no longer there.
    pub(crate) fn take(&mut self, name: &str) -> Option<Given> {
        let place = self.given.iter().position(|given| given.name == name)?;
        Some(self.given.remove(place))
    }
}

impl Given {
    fn parse(input: ParseStream<'_>) -> syn::Result<Self> {
        if input.peek(LitStr) {
            return Err(input.error("an option has a name: write key = \"order:{order_id}\""));
        }
        let name = input.call(Ident::parse_any)?;
        let value = match input.parse::<Option<Token![=]>>()? {
            Some(_) => Some(input.parse().map(ungrouped)?),
            None => None,
        };
        Ok(Given { name, value })
    }

    pub(crate) fn span(&self) -> Span {
        self.name.span()
    }

    /// The value, which this option must have.
    pub(crate) fn expr(self, example: &str) -> syn::Result<Expr> {
        let Given { name, value } = self;
        value.ok_or_else(|| Error::new(name.span(), format!("`{name}` needs a value: {example}")))
    }
}

/// What a `macro_rules!` captured, without the invisible parentheses around it.
fn ungrouped(expr: Expr) -> Expr {
    match expr {
        Expr::Group(group) => ungrouped(*group.expr),
        expr => expr,
    }
}

/// The one that was probably meant.
pub(crate) fn nearest<'a>(name: &str, known: &[&'a str]) -> Option<&'a str> {
    let distance = |known: &&&str| strsim::damerau_levenshtein(name, known);
    let best = known.iter().min_by_key(distance)?;
    (distance(&best) <= 1 + name.chars().count() / 3).then_some(best)
}

#[cfg(test)]
mod tests {
    use super::*;

    const KNOWN: &[&str] = &["key", "keys", "ttl", "wait", "hold_at_least", "fair"];

    fn parsed(text: &str) -> (Vec<String>, Vec<String>) {
        let mut faults = Faults::default();
        let args = Args::parse(text.parse().unwrap(), KNOWN, &mut faults);
        let given = args.given.iter().map(|given| given.name.to_string()).collect();
        (given, faults.0.iter().map(Error::to_string).collect())
    }

    #[test]
    fn options_keep_their_order_and_may_end_in_a_comma() {
        let (given, faults) = parsed(r#"ttl = "3s", fair, wait = f(1, 2), key = |e| e,"#);
        assert_eq!(given, ["ttl", "fair", "wait", "key"]);
        assert_eq!(faults, Vec::<String>::new());
    }

    #[test]
    fn every_fault_is_told() {
        let (given, faults) = parsed(r#"tll = 1, key = "a", key = "b", colour = 2, wait = 3"#);
        assert_eq!(given, ["key", "wait"]);
        assert_eq!(faults.len(), 3);
        assert!(faults[0].contains("write `ttl`"), "{}", faults[0]);
        assert!(faults[1].contains("given twice"), "{}", faults[1]);
        assert!(faults[2].contains("`colour`: the options are key, keys"), "{}", faults[2]);
    }

    #[test]
    fn the_nearest_name_is_near() {
        assert_eq!(nearest("holdatleast", KNOWN), Some("hold_at_least"));
        assert_eq!(nearest("timeout", KNOWN), None);
    }
}
