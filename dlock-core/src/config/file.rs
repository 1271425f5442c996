//! Reading a configuration from a file, in any format that serde supports.

use std::fmt;

use serde::de::{self, Deserialize, Deserializer, MapAccess, Visitor};

use super::Config;
use super::sources::OPTIONS;

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

/// A value in a file: a string, a number as a string, or a table of values.
enum Setting {
    Value(String),
    Table(Vec<(String, Setting)>),
}

impl Setting {
    /// Adds the options of a table under dotted names: `{ policy: { payments: { ttl } } }`
    /// is `policy.payments.ttl`.
    fn flatten(self, name: String, options: &mut Vec<(String, String)>) {
        match self {
            Setting::Value(value) => options.push((name, value)),
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
                f.write_str("a string, a whole number, true, false or a table of them")
            }
            fn visit_str<E: de::Error>(self, value: &str) -> Result<Setting, E> {
                Ok(Setting::Value(value.to_owned()))
            }
            fn visit_bool<E: de::Error>(self, value: bool) -> Result<Setting, E> {
                Ok(Setting::Value(value.to_string()))
            }
            fn visit_u64<E: de::Error>(self, number: u64) -> Result<Setting, E> {
                Ok(Setting::Value(number.to_string()))
            }
            fn visit_i64<E: de::Error>(self, number: i64) -> Result<Setting, E> {
                Ok(Setting::Value(number.to_string()))
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
