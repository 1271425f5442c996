//! A configuration from a file, in whatever format serde reads.

use std::fmt;

use serde::de::{self, Deserialize, Deserializer, MapAccess, Visitor};

use super::{Config, OPTIONS};

impl<'de> Deserialize<'de> for Config {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Options;

        impl<'de> Visitor<'de> for Options {
            type Value = Config;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "a map of the options {}", OPTIONS.join(", "))
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Config, A::Error> {
                let mut options = Vec::new();
                while let Some((name, value)) = map.next_entry::<String, Setting>()? {
                    value.flatten(name, &mut options);
                }
                options.sort_by_key(|(name, _)| name != "url"); // as for the environment
                let mut config = Config::default();
                for (name, value) in options {
                    config.set(&name, &value).map_err(de::Error::custom)?;
                }
                Ok(config)
            }
        }

        deserializer.deserialize_map(Options)
    }
}

/// A text, a number as its text, or a table of such.
enum Setting {
    Text(String),
    Table(Vec<(String, Setting)>),
}

impl Setting {
    /// `{ policy: { payments: { ttl } } }` is `policy.payments.ttl`.
    fn flatten(self, name: String, options: &mut Vec<(String, String)>) {
        match self {
            Setting::Text(text) => options.push((name, text)),
            Setting::Table(table) => {
                for (inner, setting) in table {
                    setting.flatten(format!("{name}.{inner}"), options);
                }
            }
        }
    }
}

impl<'de> Deserialize<'de> for Setting {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Any;

        impl<'de> Visitor<'de> for Any {
            type Value = Setting;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a text, a whole number or a table of them")
            }
            fn visit_str<E: de::Error>(self, text: &str) -> Result<Setting, E> {
                Ok(Setting::Text(text.to_owned()))
            }
            fn visit_u64<E: de::Error>(self, number: u64) -> Result<Setting, E> {
                Ok(Setting::Text(number.to_string()))
            }
            fn visit_i64<E: de::Error>(self, number: i64) -> Result<Setting, E> {
                Ok(Setting::Text(number.to_string()))
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Setting, A::Error> {
                let mut table = Vec::new();
                while let Some(entry) = map.next_entry()? {
                    table.push(entry);
                }
                Ok(Setting::Table(table))
            }
        }

        deserializer.deserialize_any(Any)
    }
}
