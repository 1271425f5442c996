//! The errors that rustc shows for a template or an attribute that breaks a rule. Each
//! rule has one file.
//!
//! After a change of wording, run `TRYBUILD=overwrite cargo test -p dlock-macros --test ui`.

#[test]
fn ui() {
    trybuild::TestCases::new().compile_fail("tests/ui/*/*.rs");
}
