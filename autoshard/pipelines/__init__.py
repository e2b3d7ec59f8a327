"""Training steps over several meshes: pipeline stages on unlike devices, with shares of the batch that suit them.

`split` cuts the traced loss into layers and stages; `cost` plans and prices every kind of layer on every mesh; `search`
chooses what runs where; `schedule` orders the tasks and simulates a step; `plan` puts it all into a `PipelinePlan`;
`run` executes it. Data flows in this order, and imports point against it only.
"""
