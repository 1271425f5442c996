//! The options as they are written: `name = value, ...`, each with its spans. What
//! they mean is decided in `validate`.

use proc_macro2::{Ident, Span, TokenStream};
use syn::ext::IdentExt as _;
use syn::parse::{ParseStream, Parser as _};
use syn::{Error, Expr, LitStr, Token};

use super::errors::Errors;

/// One option: `ttl = "30s"`, or `fair` without a value.
pub(crate) struct Arg {
    pub(crate) name: Ident,
    pub(crate) value: Option<Expr>,
}

/// The options of one attribute, each at most once.
pub(crate) struct Args {
    args: Vec<Arg>,
    /// Whether all options could be parsed.
    pub(crate) complete: bool,
}

impl Args {
    /// Parses options that have one of the `known` names.
    pub(crate) fn parse(tokens: TokenStream, known: &[&str], errors: &mut Errors) -> Self {
        let mut args = Args { args: Vec::new(), complete: false };
        let parse = |input: ParseStream<'_>| {
            while !input.is_empty() {
                let arg = Arg::parse(input)?;
                if !input.is_empty() {
                    input.parse::<Token![,]>()?;
                }
                args.add(arg, known, errors);
            }
            Ok(())
        };
        let parsed = parse.parse2(tokens);
        args.complete = errors.record(parsed).is_some();
        args
    }

    fn add(&mut self, arg: Arg, known: &[&str], errors: &mut Errors) {
        let name = arg.name.to_string();
        let span = arg.name.span();
        if !known.contains(&name.as_str()) {
            let options = known.join(", ");
            let meant = match closest(&name, known) {
                Some(meant) => format!("write `{meant}`; all options are"),
                None => "the options are".to_owned(),
            };
            errors.add(span, format!("there is no option `{name}`: {meant} {options}"));
        } else if self.args.iter().any(|other| other.name == arg.name) {
            errors.add(span, format!("`{name}` is given twice: remove one of them"));
        } else {
            self.args.push(arg);
        }
    }

    /// Removes the option of this name and returns it.
    pub(crate) fn take(&mut self, name: &str) -> Option<Arg> {
        let index = self.args.iter().position(|arg| arg.name == name)?;
        Some(self.args.remove(index))
    }
}

impl Arg {
    fn parse(input: ParseStream<'_>) -> syn::Result<Self> {
        if input.peek(LitStr) {
            return Err(input.error("every option needs a name: write key = \"order:{order_id}\""));
        }
        let name = input.call(Ident::parse_any)?;
        let value = match input.parse::<Option<Token![=]>>()? {
            Some(_) => Some(input.parse().map(ungrouped)?),
            None => None,
        };
        Ok(Arg { name, value })
    }

    /// The span of the name.
    pub(crate) fn span(&self) -> Span {
        self.name.span()
    }

    /// The value of an option that must have one. The error says to write `example`.
    pub(crate) fn required_value(self, example: &str) -> syn::Result<Expr> {
        let Arg { name, value } = self;
        value.ok_or_else(|| {
            Error::new(name.span(), format!("`{name}` needs a value: write {example}"))
        })
    }
}

/// Removes the invisible group around an expression that a `macro_rules!` captured.
fn ungrouped(expr: Expr) -> Expr {
    match expr {
        Expr::Group(group) => ungrouped(*group.expr),
        expr => expr,
    }
}

/// The known name that is closest to a misspelt one, if one is close enough.
pub(crate) fn closest<'a>(name: &str, known: &[&'a str]) -> Option<&'a str> {
    let distance = |known: &&&str| strsim::damerau_levenshtein(name, known);
    let best = known.iter().min_by_key(distance)?;
    (distance(&best) <= 1 + name.chars().count() / 3).then_some(best)
}

#[cfg(test)]
mod tests {
    use super::*;

    const KNOWN: &[&str] = &["key", "keys", "ttl", "wait", "hold_at_least", "fair"];

    /// The names of the options, and the errors.
    fn parsed(options: &str) -> (Vec<String>, Vec<String>) {
        let mut errors = Errors::default();
        let args = Args::parse(options.parse().unwrap(), KNOWN, &mut errors);
        let names = args.args.iter().map(|arg| arg.name.to_string()).collect();
        (names, errors.messages())
    }

    #[test]
    fn options_keep_their_order_and_may_end_in_a_comma() {
        let (names, errors) = parsed(r#"ttl = "3s", fair, wait = f(1, 2), key = |e| e,"#);
        assert_eq!(names, ["ttl", "fair", "wait", "key"]);
        assert_eq!(errors, Vec::<String>::new());
    }

    #[test]
    fn every_error_is_reported() {
        let (names, errors) = parsed(r#"tll = 1, key = "a", key = "b", colour = 2, wait = 3"#);
        assert_eq!(names, ["key", "wait"]);
        assert_eq!(errors.len(), 3);
        assert!(errors[0].contains("write `ttl`"), "{}", errors[0]);
        assert!(errors[1].contains("given twice"), "{}", errors[1]);
        assert!(errors[2].contains("`colour`: the options are key, keys"), "{}", errors[2]);
    }

    #[test]
    fn the_closest_name_is_suggested() {
        assert_eq!(closest("holdatleast", KNOWN), Some("hold_at_least"));
        assert_eq!(closest("timeout", KNOWN), None);
    }
}
