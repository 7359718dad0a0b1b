//! Running servers, looked at by people (`zebu top`).

pub(crate) mod asker;
pub(crate) mod board;
pub(crate) mod columns;
pub(crate) mod rates;
pub(crate) mod report;
pub(crate) mod sample;
pub(crate) mod screen;
