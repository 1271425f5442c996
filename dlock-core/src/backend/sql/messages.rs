//! Notices for other clients as text, for databases that deliver messages: one line for
//! each, fields separated by tabs. A channel belongs to one client.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use super::names::{LockId, Names};
use crate::backend::memory::lock_table::SentNotice;
#[cfg(feature = "postgres")]
use crate::backend::notice_message;
#[cfg(feature = "postgres")]
use crate::claim::Owner;
use crate::claim::{Grant, LossReason, Notice};
#[cfg(feature = "postgres")]
use crate::key::Key;

/// PostgreSQL takes payloads of less than 8,000 bytes.
const MAX_PAYLOAD: usize = 7_900;

/// The channel of the client with this number.
pub(super) fn channel(client: u64) -> String {
    format!("dlock_{client:016x}")
}

/// Notices as messages: channel and payload.
pub(super) fn write(names: &Names, notices: &[&SentNotice]) -> Vec<(String, String)> {
    let mut by_client: BTreeMap<u64, Vec<String>> = BTreeMap::new();
    for sent in notices {
        let line = line(names, sent);
        let payloads = by_client.entry(sent.client).or_default();
        match payloads.last_mut() {
            Some(last) if last.len() + line.len() < MAX_PAYLOAD => last.push_str(&line),
            _ => payloads.push(line),
        }
    }
    let messages = by_client.into_iter().flat_map(|(client, payloads)| {
        payloads.into_iter().map(move |payload| (channel(client), payload))
    });
    messages.collect()
}

fn line(names: &Names, sent: &SentNotice) -> String {
    // Which of the two rows it is does not matter: owners are different.
    let LockId { id, .. } = names.lock(&sent.key, false);
    let mut line = String::new();
    let owner = sent.owner;
    let _ = match &sent.notice {
        Notice::Granted { grant: Grant { first, count }, sent } => {
            let sent = sent.as_nanos();
            writeln!(line, "g\t{owner}\t{id}\t{first}\t{count}\t{sent}")
        }
        Notice::Lost(LossReason::Broken { by }) => {
            let by: String = by.chars().filter(|c| !c.is_control()).take(500).collect();
            writeln!(line, "b\t{owner}\t{id}\t{by}")
        }
        _ => writeln!(line, "t\t{owner}\t{id}\t"),
    };
    line
}

/// The notices in a payload.
#[cfg(feature = "postgres")]
pub(super) fn read<'a>(
    names: &'a Names,
    payload: &'a str,
) -> impl Iterator<Item = (Key, Owner, Notice)> + 'a {
    let key_of = |name: &str| names.lock_of(name).map(|lock| lock.key);
    payload.lines().filter_map(move |line| notice_message::read(line, key_of))
}

#[cfg(all(test, feature = "postgres"))]
mod tests {
    use super::*;
    use crate::clock::Moment;

    #[test]
    fn messages_are_read_as_they_were_written() {
        let names = Names::new("shop");
        let key = |n: usize| Key::new(format!("a key/{n}:{}", "x".repeat(400))).unwrap();
        let granted = Notice::Granted {
            grant: Grant { first: 41, count: 3 },
            sent: Moment::from_nanos(u64::MAX),
        };
        let broken = Notice::Lost(LossReason::Broken { by: "an operator".into() });
        let notices: Vec<SentNotice> = (0..60)
            .map(|n| SentNotice {
                client: (n % 2) as u64,
                key: key(n),
                owner: Owner::from_bits(n as u128),
                notice: [granted.clone(), broken.clone(), Notice::TryAgain][n % 3].clone(),
            })
            .collect();
        let written = write(&names, &notices.iter().collect::<Vec<_>>());
        assert!(written.iter().all(|(_, payload)| payload.len() < 8_000));
        for client in 0..2 {
            let payloads = written.iter().filter(|(to, _)| *to == channel(client));
            let heard: Vec<_> = payloads.flat_map(|(_, payload)| read(&names, payload)).collect();
            let sent: Vec<_> = notices
                .iter()
                .filter(|sent| sent.client == client)
                .map(|sent| (sent.key.clone(), sent.owner, sent.notice.clone()))
                .collect();
            assert_eq!(heard, sent);
        }
        assert_eq!(read(&names, "g\tx\nnonsense\n\t\t\t").count(), 0);
    }
}
