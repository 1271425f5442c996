//! A notice as one line of text, for stores that deliver messages: fields separated by
//! tabs. The first is the kind, the second the owner, the third names the key, and the
//! rest depends on the kind.

use crate::claim::{Grant, LossReason, Notice, Owner};
use crate::clock::Moment;
use crate::key::Key;

/// Reads a line. `key_of` finds the key that a name stands for.
pub(super) fn read(
    line: &str,
    key_of: impl FnOnce(&str) -> Option<Key>,
) -> Option<(Key, Owner, Notice)> {
    let mut fields = line.splitn(4, '\t');
    let kind = fields.next()?;
    let owner = u128::from_str_radix(fields.next()?, 16).ok().map(Owner::from_bits)?;
    let key = key_of(fields.next()?)?;
    let rest = fields.next()?;
    let notice = match kind {
        "g" => {
            let mut numbers = rest.split('\t').map(str::parse::<u64>);
            let mut number = || numbers.next()?.ok();
            let (first, count) = (number()?, u32::try_from(number()?).ok()?);
            let sent = Moment::from_nanos(number()?);
            Notice::Granted { grant: Grant { first, count }, sent }
        }
        "b" => Notice::Lost(LossReason::Broken { by: rest.to_owned() }),
        "t" => Notice::TryAgain,
        _ => return None,
    };
    Some((key, owner, notice))
}
