//! A record of an operation as text, as stores keep it:
//! `status quantity refunded epoch at expires segment:units,... whose`.

use super::{Id, Parts, Record, Status};

const STATUSES: [(char, Status); 11] = [
    ('t', Status::Taken),
    ('h', Status::Reserved),
    ('c', Status::Confirmed),
    ('x', Status::Cancelled),
    ('e', Status::Expired),
    ('r', Status::Refund),
    ('g', Status::DamagedRefund),
    ('s', Status::Restock),
    ('w', Status::WriteOff),
    ('q', Status::Tombstone),
    ('d', Status::Debt),
];

/// Encodes a record.
pub(crate) fn write(record: &Record) -> String {
    let Record { quantity, refunded, epoch, at, expires, .. } = record;
    let letter = STATUSES.iter().find(|(_, status)| *status == record.status);
    let letter = letter.map_or('?', |(letter, _)| *letter);
    let parts = write_parts(&record.parts);
    let whose = record.whose.as_deref().unwrap_or("");
    format!("{letter} {quantity} {refunded} {epoch} {at} {expires} {parts} {whose}")
}

/// Decodes a record.
pub(crate) fn read(text: &str) -> Option<Record> {
    let mut words = text.splitn(8, ' ');
    let letter = words.next()?.chars().next()?;
    let status = STATUSES.iter().find(|(known, _)| *known == letter)?.1;
    let mut number = || words.next()?.parse::<u64>().ok();
    let (quantity, refunded, epoch) = (number()?, number()?, number()?);
    let (at, expires) = (number()?, number()?);
    let parts = read_parts(words.next()?)?;
    let whose = Some(words.next()?).filter(|whose| !whose.is_empty()).map(Id::from);
    let epoch = u32::try_from(epoch).ok()?;
    (refunded <= quantity).then_some(())?;
    Some(Record { status, quantity, refunded, epoch, parts, at, expires, whose })
}

/// Encodes the segments that units are from.
pub(crate) fn write_parts(parts: &[(u32, u64)]) -> String {
    let parts: Vec<String> =
        parts.iter().map(|(segment, quantity)| format!("{segment}:{quantity}")).collect();
    parts.join(",")
}

/// Decodes the segments that units are from.
pub(crate) fn read_parts(text: &str) -> Option<Parts> {
    let part = |part: &str| {
        let (segment, quantity) = part.split_once(':')?;
        Some((segment.parse().ok()?, quantity.parse().ok()?))
    };
    text.split(',').filter(|part| !part.is_empty()).map(part).collect()
}
